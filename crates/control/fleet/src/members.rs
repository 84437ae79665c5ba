//! Which daemons belong to the fleet.

use thiserror::Error;

use crate::etcd::{Etcd, EtcdError};

/// A daemon of the fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Address of the daemon.
    pub url: String,
}

/// Why the members are not known.
#[derive(Debug, Error)]
pub enum MembersError {
    /// etcd does not answer.
    #[error("the hosts of the fleet are not known")]
    Etcd(#[from] EtcdError),
}

/// Where the list of daemons comes from.
#[derive(Debug)]
pub enum Members {
    /// A fixed list.
    Fixed(Vec<Member>),
    /// The daemons that hold a lease.
    Etcd(Etcd),
}

impl Members {
    /// The daemons of the fleet now.
    pub async fn list(&self) -> Result<Vec<Member>, MembersError> {
        match self {
            Self::Fixed(members) => Ok(members.clone()),
            Self::Etcd(etcd) => Ok(etcd.members().await?),
        }
    }
}
