//! Connections to ports and sockets inside the guest.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use forkd_guest_proto::{DialRequest, Event, Request, channel, frame::DATA_CHUNK};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};

use crate::stream::{Handle, Stream};
use crate::{Calls, Error};

/// A connection to something inside.
pub struct Dialled {
    stream: Stream,
}

impl Dialled {
    /// The next bytes of the peer; `None` at its end.
    pub async fn read(&self) -> Result<Option<Vec<u8>>, Error> {
        self.stream.receive(channel::OUT).await
    }

    /// Says something to the peer.
    pub async fn write(&self, bytes: &[u8]) -> Result<(), Error> {
        self.stream.send(bytes).await
    }

    /// Says that no more comes; the peer may still speak.
    pub fn shutdown(&self) {
        self.stream.end_input();
    }

    /// The connection as a byte stream, which breaks when `ended` is over. Must be called within a tokio runtime, which
    /// carries the bytes.
    #[must_use]
    pub fn into_io(self, ended: impl Future<Output = ()> + Send + 'static) -> DialledIo {
        let (near, far) = tokio::io::duplex(DATA_CHUNK);
        let broken = Arc::new(AtomicBool::new(false));
        let io = DialledIo {
            near,
            broken: Arc::clone(&broken),
        };
        tokio::spawn(async move {
            let (mut reader, mut writer) = tokio::io::split(far);
            let outward = carry_out(&self.stream, &mut reader);
            let inward = async {
                loop {
                    match self.stream.receive(channel::OUT).await {
                        Ok(Some(bytes)) => {
                            if writer.write_all(&bytes).await.is_err() {
                                return;
                            }
                        }
                        Ok(None) => break,
                        Err(_) => {
                            broken.store(true, Ordering::Release);
                            break;
                        }
                    }
                }
                let _ = writer.shutdown().await;
            };
            tokio::select! {
                _ = async { tokio::join!(outward, inward) } => {}
                () = ended => broken.store(true, Ordering::Release),
            }
        });
        io
    }
}

/// A connection to something inside, as a byte stream. A connection that broke ends with an error, never like one that
/// the peer closed.
#[derive(Debug)]
pub struct DialledIo {
    near: DuplexStream,
    broken: Arc<AtomicBool>,
}

impl AsyncRead for DialledIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.near).poll_read(cx, buffer))?;
        let at_end = buffer.filled().len() == before && buffer.remaining() > 0;
        if at_end && self.broken.load(Ordering::Acquire) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for DialledIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.near).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.near).poll_shutdown(cx)
    }
}

async fn carry_out(stream: &Handle, reader: &mut (impl AsyncReadExt + Unpin)) {
    let mut buffer = vec![0; DATA_CHUNK];
    while let Ok(count) = reader.read(&mut buffer).await {
        if count == 0
            || stream
                .send(buffer.get(..count).unwrap_or_default())
                .await
                .is_err()
        {
            break;
        }
    }
    stream.end_input();
}

impl Calls {
    /// Connects to a port or socket inside.
    pub async fn dial(&self, request: DialRequest) -> Result<Dialled, Error> {
        let stream = self.open(&Request::Dial(request))?;
        match self.deadline().bound(stream.expect_event()).await? {
            Event::Connected => Ok(Dialled { stream }),
            other => Err(Error::Closed {
                reason: format!("{other:?} before the connection stood"),
            }),
        }
    }
}
