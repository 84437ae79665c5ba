//! `forkd machine`: a managed Debian VM under QEMU in which KVM works.
//!
//! The machine gives a KVM host to users who have none, for example on a laptop or on a cloud runner without
//! nested virtualisation. It uses hardware acceleration if the host's KVM is native and nests, and software
//! emulation otherwise.
//!
//! [`Machine`] identifies a machine by name; [`Session`] is a connection to the agent inside. Start, stop and
//! removal hold one lock per machine.
//!
//! ```no_run
//! # async fn example() -> Result<(), forkd_machine::MachineError> {
//! use forkd_machine::{Machine, MachineName, Silent, StartOptions};
//!
//! let name = MachineName::for_path("test", "/src/clone".as_ref()).expect("a legal prefix");
//! let machine = Machine::named(name)?;
//! let options = StartOptions { api_port: Some(0), ..Default::default() };
//! machine.start(&options, &Silent).await?;
//! let session = machine.connect().await?;
//! session.push("./scenario".as_ref(), "/tmp/").await?;
//! let done = session.run(&["/tmp/scenario", "--quick"]).await?;
//! assert!(done.result.status.success());
//! # Ok(())
//! # }
//! ```

mod accel;
mod clock;
pub mod dirs;
mod disk;
mod error;
mod image;
mod layout;
mod lock;
mod machine;
mod name;
mod process;
pub mod programs;
mod progress;
mod qemu;
mod qmp;
mod record;
mod seed;
mod session;
mod start;
mod status;
mod stop;
mod transfer;

pub use accel::{Accel, AccelChoice, InvalidAccel};
pub use clock::{Clock, InvalidClock};
pub use error::{MachineError, RecordProblem};
pub use forkd_agent_client::{Captured, Exec, Output, Stdin};
pub use forkd_guest_proto::{ExecRequest, ExecResult, ExitStatus, OnDisconnect, PtySize};
pub use layout::Layout;
pub use machine::Machine;
pub use name::{InvalidMachineName, MachineName};
pub use progress::{Progress, Silent, Step};
pub use qemu::Qemu;
pub use session::Session;
pub use start::{DEFAULT_API_PORT, StartOptions, Started};
pub use status::{RunStatus, State, Status};
pub use stop::Stopped;
