//! What the commands do.

use std::path::{Path, PathBuf};

use forkd_image::cache::Cache;
use forkd_image::debian::DebianError;
use forkd_image::debian::mirror::Mirror;
use forkd_image::error::Error;
use forkd_image::initramfs::Flavour;
use forkd_image::kernel::Kernel;
use forkd_image::progress::Progress;
use forkd_image::{export, initramfs, kernel};
use serde_json::{Value, json};

use crate::args::{Args, Command, FlavourArg, InitramfsArgs, KernelArgs};

struct Context<'a> {
    args: &'a Args,
    cache: Cache,
    progress: Progress,
}

/// Runs the command that was typed.
pub fn run(args: &Args) -> Result<(), Error> {
    let context = Context {
        args,
        cache: Cache::of_user()?,
        progress: if args.quiet {
            Progress::silent()
        } else {
            Progress::stderr()
        },
    };
    let answer = match &args.command {
        Command::Kernel(args) => context.kernel(args)?,
        Command::Initramfs(args) => context.initramfs(args)?,
    };
    if args.json {
        println!("{:#}", answer.json);
    } else {
        println!("{}", answer.path.display());
    }
    Ok(())
}

/// What a command made.
struct Answer {
    path: PathBuf,
    json: Value,
}

impl Context<'_> {
    fn mirror(&self) -> Result<Mirror, DebianError> {
        match &self.args.mirror {
            Some(text) => Mirror::given(text),
            None => Mirror::of_host(),
        }
    }

    fn debian_kernel(&self, refresh: bool) -> Result<Kernel, Error> {
        let mirror = || self.mirror();
        Ok(kernel::debian(
            &self.cache,
            mirror,
            refresh,
            &self.progress,
        )?)
    }

    fn kernel(&self, args: &KernelArgs) -> Result<Answer, Error> {
        let kernel = match &args.own.kernel {
            Some(file) => kernel::own(
                &self.cache,
                file,
                args.own.modules.as_deref(),
                &self.progress,
            )?,
            None => self.debian_kernel(self.args.refresh)?,
        };
        let folder = match &args.out {
            Some(out) => {
                export::copy(&kernel.folder, out)?;
                out.clone()
            }
            None => kernel.folder.clone(),
        };
        let path_of = |name: &str| {
            let path = folder.join(name);
            path.exists().then_some(path)
        };
        Ok(Answer {
            json: json!({
                "folder": folder,
                "version": kernel.record.version,
                "pvh": kernel.record.pvh_entry.is_some(),
                "vmlinux": path_of("vmlinux"),
                "vmlinuz": path_of("vmlinuz"),
                "config": path_of("config"),
                "modules": path_of("modules"),
                "record": path_of("kernel.json"),
            }),
            path: folder,
        })
    }

    fn initramfs(&self, args: &InitramfsArgs) -> Result<Answer, Error> {
        let kernel = match &args.kernel_dir {
            Some(folder) => Kernel::open(folder)?,
            None => self.debian_kernel(self.args.refresh)?,
        };
        let flavour = match args.flavour {
            FlavourArg::Guest => Flavour::Guest,
            FlavourArg::Machine => Flavour::Machine,
        };
        let agent = agent(args.agent.as_deref())?;
        let made = initramfs::build(&self.cache, &kernel, &agent, flavour, &self.progress)?;
        let path = match &args.out {
            Some(out) => {
                export::copy(&made, out)?;
                out.clone()
            }
            None => made,
        };
        Ok(Answer {
            json: json!({
                "initramfs": path,
                "flavour": flavour.name(),
                "kernel": kernel.record.version,
                "agent": agent,
            }),
            path,
        })
    }
}

/// The agent that was named, or the one beside this program.
fn agent(given: Option<&Path>) -> Result<PathBuf, Error> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let path = std::env::current_exe()
        .ok()
        .and_then(|program| Some(program.parent()?.join("forkd-agent")))
        .unwrap_or_else(|| "forkd-agent".into());
    if path.is_file() {
        Ok(path)
    } else {
        Err(Error::NoAgent { path })
    }
}
