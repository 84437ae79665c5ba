//! Connections to ports and sockets inside the guest.

use forkd_guest_proto::{DialRequest, Event, Request, channel, frame::DATA_CHUNK};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

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

    /// The connection as a byte stream. Must be called within a tokio runtime, which carries the bytes.
    #[must_use]
    pub fn into_io(self) -> DuplexStream {
        let (near, far) = tokio::io::duplex(DATA_CHUNK);
        tokio::spawn(async move {
            let (mut reader, mut writer) = tokio::io::split(far);
            let outward = carry_out(&self.stream, &mut reader);
            let inward = async {
                while let Ok(Some(bytes)) = self.stream.receive(channel::OUT).await {
                    if writer.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                let _ = writer.shutdown().await;
            };
            tokio::join!(outward, inward);
        });
        near
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
