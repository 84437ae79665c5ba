//! Files and outputs that more than one program of forkd reads or writes.
//!
//! | module | file | written by | read by |
//! |---|---|---|---|
//! | [`layer`] | a disk layer | daemon, VMM | daemon, VMM |
//! | [`page_map`] | the page index of a memory image | VMM | daemon, VMM |
//! | [`image`] | `image.json` beside a root disk | `forkd-image` | daemon |
//! | [`prepare`] | the preparation of a parent, a part of `image.json` | `forkd-image` | daemon |
//! | [`image_cli`] | standard output of `forkd-image --json` | `forkd-image` | daemon |
//!
//! Every format has a version. A reader knows one version and refuses any other: nothing is converted. A reader treats
//! the content as hostile, because a VMM that was taken over may have written it.

pub mod image;
pub mod image_cli;
pub mod image_origin;
pub mod layer;
pub mod page_map;
pub mod prepare;
