//! A user of the command line.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A user with an empty home directory. The only QEMU is the one that a test makes.
pub struct User {
    pub home: tempfile::TempDir,
}

impl User {
    pub fn new() -> Self {
        Self {
            home: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forkd"));
        command
            .args(args)
            .env_clear()
            .env("HOME", self.home.path())
            .stdin(Stdio::null());
        // Tools such as mke2fs; the folder of the programs has none of ours.
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("FORKD_PROGRAMS", self.path("programs"));
        command.env("FORKD_QEMU", self.path("qemu"));
        command
    }

    pub fn run(&self, args: &[&str]) -> String {
        self.show(self.command(args).output().unwrap())
    }

    /// Exit code, stdout and stderr, with the home directory taken out.
    pub fn show(&self, output: Output) -> String {
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes)
                .replace(&self.home.path().display().to_string(), "[HOME]")
        };
        format!(
            "exit: {}\n--- stdout\n{}--- stderr\n{}",
            output.status.code().unwrap_or(-1),
            text(&output.stdout),
            text(&output.stderr)
        )
    }

    /// A QEMU that answers `--version` and runs `script` otherwise.
    pub fn qemu(&self, version: &str, script: &str) {
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'QEMU emulator version {version}'; exit; fi\n{script}\n"
        );
        executable(&self.path("qemu"), &text);
    }

    /// A folder that passes for a machine image.
    pub fn image(&self) -> PathBuf {
        let folder = self.path("image");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("image.json"), r#"{"schema":1,"kernel":"6.12"}"#).unwrap();
        for part in ["vmlinuz", "initramfs.cpio", "root.ext4"] {
            fs::write(folder.join(part), "").unwrap();
        }
        folder
    }
}

pub fn executable(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}
