//! Requests of builds: trees of files as tar streams, mounts, and the end of all user processes.

use std::time::Duration;

use forkd_guest_proto::{
    ArchiveResult, MountRequest, MountResult, PackRequest, Request, UnmountRequest, UnpackRequest,
    channel, frame::DATA_CHUNK,
};

use crate::deadline::Deadline;
use crate::stream::Stream;
use crate::{Calls, Error};

/// How long a stream may stand still. A guest may have to read or write a large file meanwhile.
const IDLE: Duration = Duration::from_secs(300);

/// A tree that is being packed.
pub struct Packing {
    stream: Stream,
    done: Option<ArchiveResult>,
}

impl Packing {
    /// The next bytes; `None` after the last. A failure on the way is an error, never a short archive.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        if self.done.is_some() {
            return Ok(None);
        }
        let next = async {
            let next = self.stream.receive(channel::BULK).await?;
            let done = match next {
                None => Some(self.stream.response().await?),
                Some(_) => None,
            };
            Ok((next, done))
        };
        let (next, done) = Deadline::within(IDLE).bound(next).await?;
        self.done = done;
        Ok(next)
    }
}

/// A tree that is being unpacked. Dropped before [`Self::finish`], part of it is there.
pub struct Unpacking {
    stream: Stream,
}

impl Unpacking {
    /// Hands bytes over, as fast as the guest takes them.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for part in bytes.chunks(DATA_CHUNK) {
            Deadline::within(IDLE).bound(self.stream.send(part)).await?;
        }
        Ok(())
    }

    /// Ends the archive and waits until everything is in place.
    pub async fn finish(self) -> Result<ArchiveResult, Error> {
        self.stream.end_input();
        Deadline::within(IDLE).bound(self.stream.response()).await
    }
}

impl Calls {
    /// Packs files into a stream.
    pub fn pack(&self, request: PackRequest) -> Result<Packing, Error> {
        Ok(Packing {
            stream: self.open(&Request::Pack(request))?,
            done: None,
        })
    }

    /// Unpacks the files of a stream.
    pub fn unpack(&self, request: UnpackRequest) -> Result<Unpacking, Error> {
        Ok(Unpacking {
            stream: self.open(&Request::Unpack(request))?,
        })
    }

    /// Mounts something on a path of the guest.
    pub async fn mount(&self, request: MountRequest) -> Result<MountResult, Error> {
        self.call(&Request::Mount(request)).await
    }

    /// Ends a mount.
    pub async fn unmount(&self, request: UnmountRequest) -> Result<(), Error> {
        self.call(&Request::Unmount(request)).await
    }

    /// Kills every user process and waits until none is left.
    pub async fn kill_all(&self) -> Result<(), Error> {
        self.call(&Request::KillAll).await
    }
}
