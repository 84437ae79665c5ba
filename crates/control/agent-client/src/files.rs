//! Requests about files.

use std::time::Duration;

use forkd_guest_proto::{
    Entry, Event, FileInfo, ListRequest, ListResult, MkdirRequest, ReadRequest, ReadResult,
    RemoveRequest, RenameRequest, Request, SetAttrRequest, StatRequest, WatchEvent, WatchRequest,
    WriteRequest, WriteResult, channel, frame::DATA_CHUNK,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::deadline::Deadline;
use crate::stream::Stream;
use crate::{Calls, Error};

/// The longest listing, as it is sent.
const MAX_LISTING: usize = 8 << 20;

/// How long a transfer may stand still. Both ends of it are in the guest's hands, so a deadline for the whole would
/// have to be as long as the largest file takes.
const TRANSFER_IDLE: Duration = Duration::from_secs(60);

fn transfer() -> Deadline {
    Deadline::within(TRANSFER_IDLE)
}

/// A file being read.
pub struct FileReader {
    stream: Stream,
    info: FileInfo,
}

impl FileReader {
    /// Describes the file.
    #[must_use]
    pub fn info(&self) -> &FileInfo {
        &self.info
    }

    /// The next bytes; `None` after the last. A failure on the way is an error, never a short file.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        transfer()
            .bound(async {
                let next = self.stream.receive(channel::BULK).await?;
                if next.is_none() {
                    let _: ReadResult = self.stream.response().await?;
                }
                Ok(next)
            })
            .await
    }
}

/// A file being written. Dropped before [`Self::finish`], the write is cancelled.
pub struct FileWriter {
    stream: Stream,
}

impl FileWriter {
    /// Writes, as fast as the guest takes it.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for part in bytes.chunks(DATA_CHUNK) {
            transfer().bound(self.stream.send(part)).await?;
        }
        Ok(())
    }

    /// Ends the content and waits until it is in place.
    pub async fn finish(self) -> Result<WriteResult, Error> {
        self.stream.end_input();
        transfer().bound(self.stream.response()).await
    }
}

/// Changes to files, until dropped.
pub struct Watch {
    stream: Stream,
}

impl Watch {
    /// The next changes.
    pub async fn next(&mut self) -> Result<Vec<WatchEvent>, Error> {
        loop {
            if let Event::Changes { changes } = self.stream.expect_event().await? {
                return Ok(changes);
            }
        }
    }
}

impl Calls {
    /// Opens a file for reading. The deadline is that of opening it.
    pub async fn read(&self, request: ReadRequest) -> Result<FileReader, Error> {
        let stream = self.open(&Request::Read(request))?;
        match self.deadline().bound(stream.expect_event()).await? {
            Event::File(info) => Ok(FileReader { stream, info }),
            other => Err(Error::Closed {
                reason: format!("{other:?} before the file was open"),
            }),
        }
    }

    /// Reads a whole file of up to `limit` bytes.
    pub async fn read_file(&self, path: &str, limit: usize) -> Result<Vec<u8>, Error> {
        let request = ReadRequest {
            path: path.to_owned(),
            ..Default::default()
        };
        let mut reader = self.read(request).await?;
        let mut content = Vec::new();
        while let Some(bytes) = reader.next().await? {
            if content.len() + bytes.len() > limit {
                return Err(Error::OverLimit { limit });
            }
            content.extend_from_slice(&bytes);
        }
        Ok(content)
    }

    /// Copies a file to a writer; says how many bytes.
    pub async fn download(
        &self,
        request: ReadRequest,
        mut target: impl AsyncWrite + Unpin,
    ) -> Result<u64, Error> {
        let mut reader = self.read(request).await?;
        let mut total = 0;
        let failed = |source| Error::Local {
            action: "write",
            source,
        };
        while let Some(bytes) = reader.next().await? {
            target.write_all(&bytes).await.map_err(failed)?;
            total += bytes.len() as u64;
        }
        target.flush().await.map_err(failed)?;
        Ok(total)
    }

    /// Opens a file for writing.
    pub fn write(&self, request: WriteRequest) -> Result<FileWriter, Error> {
        Ok(FileWriter {
            stream: self.open(&Request::Write(request))?,
        })
    }

    /// Writes a whole file.
    pub async fn write_file(
        &self,
        request: WriteRequest,
        content: &[u8],
    ) -> Result<WriteResult, Error> {
        let mut writer = self.write(request)?;
        writer.write(content).await?;
        writer.finish().await
    }

    /// Copies a reader to a file.
    pub async fn upload(
        &self,
        request: WriteRequest,
        mut source: impl AsyncRead + Unpin,
    ) -> Result<WriteResult, Error> {
        let mut writer = self.write(request)?;
        let mut buffer = vec![0; DATA_CHUNK];
        loop {
            let count = source
                .read(&mut buffer)
                .await
                .map_err(|source| Error::Local {
                    action: "read",
                    source,
                })?;
            if count == 0 {
                return writer.finish().await;
            }
            writer
                .write(buffer.get(..count).unwrap_or_default())
                .await?;
        }
    }

    /// Describes the file at a path; follows symbolic links.
    pub async fn stat(&self, path: &str) -> Result<FileInfo, Error> {
        self.stat_with(StatRequest {
            path: path.to_owned(),
            ..StatRequest::default()
        })
        .await
    }

    /// Describes the file at a path.
    pub async fn stat_with(&self, request: StatRequest) -> Result<FileInfo, Error> {
        self.call(&Request::Stat(request)).await
    }

    /// Lists a directory. What an agent sends past the limit that was asked for, or past 8 MiB, is an error.
    pub async fn list(&self, request: ListRequest) -> Result<(Vec<Entry>, ListResult), Error> {
        self.deadline().bound(self.collect_list(request)).await
    }

    async fn collect_list(&self, request: ListRequest) -> Result<(Vec<Entry>, ListResult), Error> {
        let limit = request.limit.unwrap_or(u64::MAX);
        let stream = self.open(&Request::List(request))?;
        let mut all = Vec::new();
        let mut held = self.budget().hold();
        let mut received = 0;
        while let Some(bytes) = stream.receive(channel::EVENTS).await? {
            received += bytes.len();
            if received > MAX_LISTING {
                return Err(Error::OverLimit { limit: MAX_LISTING });
            }
            held.grow(bytes.len())?;
            let event =
                serde_json::from_slice(&bytes).map_err(|source| Error::BadAnswer { source })?;
            if let Event::Entries { entries } = event {
                all.extend(entries);
            }
            if all.len() as u64 > limit {
                return Err(Error::TooMany { limit });
            }
        }
        Ok((all, stream.response().await?))
    }

    /// Makes a directory.
    pub async fn mkdir(&self, request: MkdirRequest) -> Result<(), Error> {
        self.call(&Request::Mkdir(request)).await
    }

    /// Renames a file or directory.
    pub async fn rename(&self, request: RenameRequest) -> Result<(), Error> {
        self.call(&Request::Rename(request)).await
    }

    /// Removes a file or directory.
    pub async fn remove(&self, request: RemoveRequest) -> Result<(), Error> {
        self.call(&Request::Remove(request)).await
    }

    /// Changes permissions or owner.
    pub async fn set_attr(&self, request: SetAttrRequest) -> Result<(), Error> {
        self.call(&Request::SetAttr(request)).await
    }

    /// Watches a file or directory. When this returns the watch is in place.
    pub async fn watch(&self, request: WatchRequest) -> Result<Watch, Error> {
        let stream = self.open(&Request::Watch(request))?;
        match self.deadline().bound(stream.expect_event()).await? {
            Event::Watching => Ok(Watch { stream }),
            other => Err(Error::Closed {
                reason: format!("{other:?} before the watch stood"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Client, Options};
    use forkd_guest_proto::{Decoder, Frame, Hello, Kind, frame};
    use tokio::io::DuplexStream;

    async fn next_frame(io: &mut DuplexStream, decoder: &mut Decoder) -> Frame {
        loop {
            let byte = [io.read_u8().await.unwrap()];
            if let Some(frame) = decoder.next(&mut byte.as_slice()).unwrap() {
                return frame;
            }
        }
    }

    /// Answers a listing with entries and never with its end.
    async fn sends_entries(mut io: DuplexStream, count: usize) -> DuplexStream {
        let mut decoder = Decoder::new();
        next_frame(&mut io, &mut decoder).await;
        let hello = serde_json::to_vec(&Hello::default()).unwrap();
        io.write_all(&frame::encode(0, Kind::Hello, 0, &hello))
            .await
            .unwrap();
        let request = next_frame(&mut io, &mut decoder).await;
        let entry = br#"{"event": "entries", "entries":
            [{"path": "x", "kind": "file", "size": 0, "mode": 0}]}"#;
        let entry = frame::encode(request.stream, Kind::Event, 0, entry);
        io.write_all(&entry.repeat(count)).await.unwrap();
        io
    }

    #[tokio::test]
    async fn a_listing_longer_than_asked_for_is_not_held() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let agent = tokio::spawn(sends_entries(theirs, 4));
        let client = Client::connect(ours, Options::default()).await.unwrap();
        let listed = client
            .by(transfer())
            .list(ListRequest {
                path: "/".into(),
                depth: 1,
                limit: Some(3),
                attributes: None,
            })
            .await;
        assert!(
            matches!(listed, Err(Error::TooMany { limit: 3 })),
            "{listed:?}"
        );
        drop(agent.await.unwrap());
    }
}
