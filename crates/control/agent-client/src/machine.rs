//! Requests about the guest as a machine.

use forkd_guest_proto::{
    ClockRequest, ClockState, FreezeReport, FreezeRequest, HoldVolumeRequest, IdentityReport,
    IdentityRequest, Metrics, MountVolumeRequest, NetworkRequest, Pong, QuiesceReport,
    QuiesceRequest, Request, ResetReport, ServiceInfo, ServiceStart, SettleReport, SettleRequest,
    ShutdownRequest, ThawReport,
};

use crate::{Calls, Error};

impl Calls {
    /// Asks whether the agent answers.
    pub async fn ping(&self) -> Result<Pong, Error> {
        self.call(&Request::Ping).await
    }

    /// Reads the clocks, after setting the wall clock if asked.
    pub async fn clock(&self, request: ClockRequest) -> Result<ClockState, Error> {
        self.call(&Request::Clock(request)).await
    }

    /// Makes a fork a machine of its own.
    pub async fn identity(&self, request: IdentityRequest) -> Result<IdentityReport, Error> {
        self.call(&Request::Identity(Box::new(request))).await
    }

    /// Resources that the guest uses.
    pub async fn metrics(&self) -> Result<Metrics, Error> {
        self.call(&Request::Metrics).await
    }

    /// Prepares the guest for a freeze.
    pub async fn quiesce(&self, request: QuiesceRequest) -> Result<QuiesceReport, Error> {
        self.call(&Request::Quiesce(request)).await
    }

    /// Starts a service. Returns when the service is ready.
    pub async fn service_start(&self, start: ServiceStart) -> Result<ServiceInfo, Error> {
        self.call(&Request::ServiceStart(Box::new(start))).await
    }

    /// The services of the guest.
    pub async fn services(&self) -> Result<Vec<ServiceInfo>, Error> {
        self.call(&Request::Services).await
    }

    /// Waits until the guest is calm, or until the time of the request is over.
    pub async fn settle(&self, request: SettleRequest) -> Result<SettleReport, Error> {
        self.call(&Request::Settle(request)).await
    }

    /// Mounts a disk that was attached.
    pub async fn mount_volume(&self, request: MountVolumeRequest) -> Result<(), Error> {
        self.call(&Request::MountVolume(request)).await
    }

    /// Holds writes to a mount, with its file system clean, or lets them go on.
    pub async fn hold_volume(&self, request: HoldVolumeRequest) -> Result<(), Error> {
        self.call(&Request::HoldVolume(request)).await
    }

    /// Freezes user processes, before a cut.
    pub async fn freeze(&self, request: FreezeRequest) -> Result<FreezeReport, Error> {
        self.call(&Request::Freeze(request)).await
    }

    /// Lets user processes run.
    pub async fn thaw(&self) -> Result<ThawReport, Error> {
        self.call(&Request::Thaw).await
    }

    /// Sets up an interface.
    pub async fn network(&self, request: NetworkRequest) -> Result<(), Error> {
        self.call(&Request::Network(request)).await
    }

    /// Breaks every connection of the guest to elsewhere. An agent from before this request answers `unsupported`.
    pub async fn reset_connections(&self) -> Result<ResetReport, Error> {
        self.call(&Request::ResetConnections).await
    }

    /// Ends the guest. Returns when the guest has begun to go down.
    pub async fn shutdown(&self, request: ShutdownRequest) -> Result<(), Error> {
        self.call(&Request::Shutdown(request)).await
    }
}
