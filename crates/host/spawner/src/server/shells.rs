//! Making shells: from a new process to one that can be filled.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Instant;

use forkd_types::chain;
use forkd_vmm_proto::spawn::{FromSpawn, SpawnError};
use forkd_vmm_proto::{Capabilities, Capability, FromVmm, Shape, decode};
use rustix::event::epoll;

use super::{Entry, Server, State, Token, end, threads, watch, within};
use crate::client::would_block;
use crate::handshake::{self, BeginError, Progress, Progressed};

impl Server {
    /// Starts what the pools lack.
    pub(super) fn refill(&mut self) {
        if self
            .burst
            .is_some_and(|burst| burst.over_at() > Instant::now())
        {
            return;
        }
        self.burst = None;
        for shape in self.pools.start_making(Instant::now()) {
            if let Err(error) = self.start(shape, true) {
                crate::say(&format!("a pool cannot be filled: {error}"));
                self.pools.failed(&shape, Instant::now());
            }
        }
    }

    pub(super) fn start(&mut self, shape: Shape, for_pool: bool) -> Result<(), SpawnError> {
        let failed = |reason: String| SpawnError::ShellFailed { reason };
        within(
            "the number of VMs",
            self.processes.len() as u64 + 1,
            self.settings.max_processes as u64,
        )?;
        let number = self.number();
        let program = self.settings.engines.get(shape.engine)?;
        let (arguments, folder) = program
            .arguments(number)
            .map_err(|error| failed(format!("a VM has no folder: {error}")))?;
        let process = self
            .jails
            .start(&program.path, &arguments)
            .map_err(|error| failed(chain(&error)))?;
        let leaf = match &mut self.cgroups {
            Ok(cgroups) => {
                let leaf = cgroups.leaf(process.pid(), threads(&shape));
                Some(leaf.map_err(|error| failed(format!("a VM has no cgroup: {error}")))?)
            }
            Err(_) => None,
        };
        let user = self.jails.user();
        let begun = handshake::begin(process.control()).map_err(|error| chain(&error));
        let watched = begun.and_then(|()| {
            let control = watch(
                &self.epoll,
                process.control().as_fd(),
                Token::Control(number),
            );
            (control && watch(&self.epoll, process.pidfd(), Token::End(number)))
                .then_some(())
                .ok_or_else(|| "the new VMM process cannot be watched".to_owned())
        });
        if let Err(reason) = watched {
            drop(process);
            self.bury(leaf, Vec::new());
            return Err(failed(reason));
        }
        let state = State::Making {
            for_pool,
            progress: Progress::new(shape.engine),
        };
        self.processes.insert(
            number,
            Entry {
                process,
                shape,
                state,
                capabilities: Capabilities::empty(),
                leaf,
                user,
                _folder: folder,
                killers: Vec::new(),
            },
        );
        Ok(())
    }

    /// The VMM in the making has said something.
    pub(super) fn control_event(&mut self, number: u64) {
        let Some(entry) = self.processes.get_mut(&number) else {
            return;
        };
        let State::Making { progress, .. } = &mut entry.state else {
            return;
        };
        let mut buffer = vec![0; forkd_vmm_proto::MAX_MESSAGE];
        let message = match entry.process.control().recv(&mut buffer) {
            Ok(packet) => decode::<FromVmm>(&buffer[..packet.len]).map_err(|e| chain(&e)),
            Err(error) if would_block(&error) => return,
            Err(error) => Err(chain(&error)),
        };
        match message.and_then(|message| progress.advance(message)) {
            Ok(Progressed::Wait) => {}
            Ok(Progressed::Greeted) => {
                if let Err(error) = self.prepare(number) {
                    self.shell_failed(number, &chain(&error));
                }
            }
            Ok(Progressed::Ready(capabilities)) => self.shell_ready(number, capabilities),
            Err(reason) => self.shell_failed(number, &reason),
        }
    }

    /// Hands a VMM that has answered the hello what its shell is built from.
    pub(super) fn prepare(&mut self, number: u64) -> Result<(), BeginError> {
        let kvm = match &self.kvm {
            Some(kvm) => kvm,
            None => {
                let opened = File::options().read(true).write(true).open("/dev/kvm");
                self.kvm.insert(opened.map_err(BeginError::Kvm)?.into())
            }
        };
        let Some(entry) = self.processes.get(&number) else {
            return Ok(());
        };
        if let Err(error) = entry.process.allow_oom_kill() {
            crate::say(&format!("a VM is protected when memory runs out: {error}"));
        }
        let pagemap = entry.process.open_pagemap();
        if let Err(error) = &pagemap {
            crate::say(&format!(
                "cuts of a VM will hold more than changed: its page map cannot be opened: {error}"
            ));
        }
        let pagemap = pagemap.ok();
        handshake::prepare(
            entry.process.control(),
            entry.shape,
            kvm.as_fd(),
            pagemap.as_ref().map(AsFd::as_fd),
            self.jails.spec(entry.user.as_ref()),
        )
    }

    pub(super) fn shell_ready(&mut self, number: u64, capabilities: Capabilities) {
        let Some(entry) = self.processes.get_mut(&number) else {
            return;
        };
        let shape = entry.shape;
        entry.capabilities = capabilities;
        let was = std::mem::replace(&mut entry.state, State::Ready);
        let for_pool = matches!(was, State::Making { for_pool: true, .. });
        // From now on what the VMM says is for the controller to read.
        let _ = epoll::delete(&self.epoll, entry.process.control());
        if let Some(at) = self.pending.iter().position(|take| take.shape == shape) {
            if for_pool {
                self.pools.diverted(&shape);
            }
            self.pending[at].got.push((number, false));
            if self.pending[at].got.len() == self.pending[at].ids.len()
                && let Some(take) = self.pending.remove(at)
            {
                self.hand_out(take);
            }
            return;
        }
        if !capabilities.contains(Capability::PooledShells) {
            // The engine fills a VM as it makes it: there is nothing to keep ready.
            for ready in self.pools.set_depth(shape, 0) {
                self.discard(ready);
            }
        }
        let surplus = if for_pool {
            self.pools.made(&shape, number)
        } else {
            self.pools.offer(&shape, number)
        };
        if surplus.is_some() {
            self.discard(number);
        }
    }

    pub(super) fn shell_failed(&mut self, number: u64, reason: &str) {
        let Some(mut entry) = self.processes.remove(&number) else {
            return;
        };
        self.bury(entry.leaf.take(), Vec::new());
        self.shells_lost += 1;
        let State::Making { for_pool, .. } = entry.state else {
            return;
        };
        if for_pool {
            crate::say(&format!("a shell could not be made: {reason}"));
            return self.pools.failed(&entry.shape, Instant::now());
        }
        let Some(at) = self
            .pending
            .iter()
            .position(|take| take.shape == entry.shape)
        else {
            return;
        };
        let Some(take) = self.pending.remove(at) else {
            return;
        };
        self.give_back(&take);
        let result = Err(SpawnError::ShellFailed {
            reason: reason.to_owned(),
        });
        self.send(
            take.client,
            &FromSpawn::Response {
                seq: take.seq,
                result,
            },
            Vec::new(),
        );
    }

    /// Ends a shell that is not wanted; its end is noticed and reaped like any other.
    pub(super) fn discard(&mut self, number: u64) {
        if let Some(entry) = self.processes.get(&number) {
            end(entry);
        }
    }
}
