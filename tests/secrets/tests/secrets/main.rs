//! Secrets between real processes.

mod broker;
