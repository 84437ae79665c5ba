//! Bytes that a thread writes, as the body of a request.

use std::io::{self, Write};

use futures::Stream;
use tokio::sync::mpsc;

/// Pieces on their way.
const PIECES: usize = 4;

/// A stream of the bytes that `work` writes in a thread of its own. An error of the work ends the stream.
pub fn stream(
    work: impl FnOnce(Pipe) -> io::Result<()> + Send + 'static,
) -> impl Stream<Item = io::Result<Vec<u8>>> + Send + 'static {
    let (sender, mut receiver) = mpsc::channel(PIECES);
    std::thread::spawn(move || {
        if let Err(error) = work(Pipe(sender.clone())) {
            // A receiver that is gone has its own reason.
            let _ = sender.blocking_send(Err(error));
        }
    });
    futures::stream::poll_fn(move |context| receiver.poll_recv(context))
}

/// Writes become pieces of the stream.
pub struct Pipe(mpsc::Sender<io::Result<Vec<u8>>>);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(bytes.to_vec()));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
