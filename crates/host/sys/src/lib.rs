//! Safe wrappers over the system calls the host programs need.
