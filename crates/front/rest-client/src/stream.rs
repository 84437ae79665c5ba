//! Answers that are streamed as one JSON object per line.

use std::collections::VecDeque;
use std::marker::PhantomData;

use reqwest::Response;
use serde::de::DeserializeOwned;

use crate::Error;

/// Longest accepted line in bytes. A longer one is an error, so that a broken peer cannot exhaust memory.
const MAX_LINE: usize = 16 << 20;

/// The line of a stream on which nothing happened for a while.
const KEEPALIVE: &[u8] = br#"{"type":"keepalive"}"#;

/// A stream of JSON objects, one per line.
#[derive(Debug)]
pub struct Frames<T> {
    response: Response,
    rest: Vec<u8>,
    ready: VecDeque<Vec<u8>>,
    item: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Frames<T> {
    pub(crate) fn new(response: Response) -> Self {
        Self {
            response,
            rest: Vec::new(),
            ready: VecDeque::new(),
            item: PhantomData,
        }
    }

    /// The next object; `None` at the end of the answer.
    pub async fn next(&mut self) -> Result<Option<T>, Error> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                let status = self.response.status().as_u16();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|source| Error::BadAnswer { status, source });
            }
            let chunk = self
                .response
                .chunk()
                .await
                .map_err(|error| Error::CutOff(Error::root(error)))?;
            let Some(chunk) = chunk else {
                return Ok(None);
            };
            self.rest.extend_from_slice(&chunk);
            self.split();
            if self.rest.len() > MAX_LINE {
                let text = std::io::Error::other("a line of the answer exceeds 16 MiB");
                return Err(Error::CutOff(Box::new(text)));
            }
        }
    }

    fn split(&mut self) {
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let mut line: Vec<u8> = self.rest.drain(..=end).collect();
            line.pop();
            if !line.is_empty() && line != KEEPALIVE {
                self.ready.push_back(line);
            }
        }
    }
}
