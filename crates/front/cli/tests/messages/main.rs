//! Text, streams and exit codes of commands that need no running machine and no daemon but a fake one.

mod fake_daemon;
mod machine;
mod requests;
mod usage;
mod user;
