//! The daemon that owns every sandbox and snapshot of a host.
