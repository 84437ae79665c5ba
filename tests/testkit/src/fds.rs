//! Collects the descriptors of a message to a VMM, and their indexes.

use std::os::fd::OwnedFd;

use forkd_vmm_proto::FdList;

/// Descriptors in the order a message names them.
pub type Fds = FdList<OwnedFd>;
