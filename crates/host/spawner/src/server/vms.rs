//! VMs that are handed out: taking, limiting, adopting and ending them.

use std::time::Instant;

use forkd_types::{Engine, SandboxId};
use forkd_vmm_proto::Shape;
use forkd_vmm_proto::spawn::{
    FromSpawn, Jail, Limits, MAX_BATCH, MissingWall, SpawnError, SpawnReply, Vm, Wall, Walls,
};

use super::{BurstOfTakes, Grave, PendingTake, Server, State, end, share, threads, within};
use crate::cgroup::{self, Cgroups, Leaf};

impl Server {
    pub(super) fn walls(&self) -> Walls {
        let limits = self.cgroups.as_ref().map_or(Walls::empty(), Cgroups::walls);
        limits.iter().chain(self.jails.walls().iter()).collect()
    }

    /// The walls that do not stand, with reasons.
    pub(super) fn missing_walls(&self) -> Vec<MissingWall> {
        let have = self.walls();
        Walls::all()
            .missing_from(have)
            .map(|wall| MissingWall {
                wall: wall.name().to_owned(),
                reason: self.why_missing(wall),
            })
            .collect()
    }

    fn why_missing(&self, wall: Wall) -> String {
        match (self.jails.reason(wall), &self.cgroups) {
            (Some(reason), _) => reason.to_owned(),
            (None, Err(reason)) => reason.clone(),
            (None, Ok(cgroups)) => cgroups.why_missing(wall),
        }
    }

    /// Refuses what cannot be kept: a VM whose limit silently does not hold is worse than none.
    pub(super) fn check_walls(
        &self,
        engine: Engine,
        limits: &Limits,
        jail: Jail,
    ) -> Result<(), SpawnError> {
        cgroup::check(limits)?;
        let have = self.settings.engines.walls(engine, self.walls());
        let missing = limits
            .walls()
            .missing_from(have)
            .chain(jail.required.missing_from(have))
            .next();
        let Some(wall) = missing else {
            return Ok(());
        };
        let reason = match self.settings.engines.missing_wall(engine) {
            Some((missing, reason)) if missing == wall => reason.to_owned(),
            _ => self.why_missing(wall),
        };
        Err(SpawnError::NoWall {
            wall: wall.to_string(),
            reason,
        })
    }

    pub(super) fn set_limits(
        &mut self,
        id: &SandboxId,
        limits: &Limits,
    ) -> Result<SpawnReply, SpawnError> {
        let walls = self.walls();
        let entry = self
            .live
            .get(id)
            .and_then(|number| self.processes.get(number))
            .ok_or_else(|| SpawnError::Unknown { id: id.clone() })?;
        self.check_walls(entry.shape.engine, limits, Jail::default())?;
        if let Some(leaf) = &entry.leaf {
            leaf.set(limits, walls, threads(&entry.shape))?;
        }
        Ok(SpawnReply::Done)
    }

    pub(super) fn take(
        &mut self,
        client: u64,
        seq: u64,
        shape: Shape,
        ids: Vec<SandboxId>,
        limits: Limits,
        jail: Jail,
    ) -> Result<(), SpawnError> {
        within("the number of ids", ids.len() as u64, MAX_BATCH as u64)?;
        self.settings.engines.get(shape.engine)?;
        self.check_walls(shape.engine, &limits, jail)?;
        for (at, id) in ids.iter().enumerate() {
            let pending = self.pending.iter().any(|take| take.ids.contains(id));
            if pending || self.live.contains_key(id) || ids[..at].contains(id) {
                return Err(SpawnError::Duplicate { id: id.clone() });
            }
        }
        self.burst = Some(BurstOfTakes::with_take(self.burst, Instant::now()));
        let mut take = PendingTake {
            client,
            seq,
            shape,
            limits,
            got: Vec::with_capacity(ids.len()),
            ids,
        };
        while take.got.len() < take.ids.len() {
            let Some(number) = self.pools.take(&shape) else {
                break;
            };
            take.got.push((number, true));
        }
        for _ in take.got.len()..take.ids.len() {
            if let Err(error) = self.start(shape, false) {
                self.give_back(&take);
                return Err(error);
            }
        }
        if take.got.len() == take.ids.len() {
            self.hand_out(take);
        } else {
            self.pending.push_back(take);
        }
        Ok(())
    }

    /// Completes a take: the processes become live and their descriptors go to the client. If a limit cannot be set,
    /// none becomes live.
    pub(super) fn hand_out(&mut self, take: PendingTake) {
        if let Err(error) = self.limit(&take) {
            // Some of them may have a limit by now, so they do not go back to the pool.
            for (number, _) in &take.got {
                self.discard(*number);
            }
            let reply = FromSpawn::Response {
                seq: take.seq,
                result: Err(error),
            };
            return self.send(take.client, &reply, Vec::new());
        }
        let mut vms = Vec::with_capacity(take.ids.len());
        let mut sockets = Vec::with_capacity(2 * take.ids.len());
        for (id, (number, pooled)) in take.ids.into_iter().zip(take.got) {
            let Some(entry) = self.processes.get_mut(&number) else {
                continue;
            };
            let Ok(shared) = share(&entry.process) else {
                entry.process.kill();
                continue;
            };
            entry.state = State::Live(id.clone());
            self.live.insert(id.clone(), number);
            vms.push(Vm {
                id,
                pid: entry.process.pid(),
                shape: entry.shape,
                capabilities: entry.capabilities,
                pooled,
            });
            sockets.extend(shared);
        }
        let reply = FromSpawn::Response {
            seq: take.seq,
            result: Ok(SpawnReply::Taken(vms)),
        };
        self.send(take.client, &reply, sockets);
    }

    /// Sets the limits of a take before anything of it becomes live.
    pub(super) fn limit(&self, take: &PendingTake) -> Result<(), SpawnError> {
        if take.limits == Limits::default() {
            return Ok(());
        }
        let walls = self.walls();
        let leaves = take
            .got
            .iter()
            .filter_map(|(number, _)| self.processes.get(number)?.leaf.as_ref());
        for leaf in leaves {
            leaf.set(&take.limits, walls, threads(&take.shape))?;
        }
        Ok(())
    }

    pub(super) fn give_back(&mut self, take: &PendingTake) {
        for (number, _) in &take.got {
            if self.pools.offer(&take.shape, *number).is_some() {
                self.discard(*number);
            }
        }
    }

    pub(super) fn adopt(&mut self, client: u64, seq: u64, after: Option<&SandboxId>) {
        let mut vms = Vec::new();
        let mut sockets = Vec::new();
        let mut more = false;
        for (id, number) in &self.live {
            if after.is_some_and(|after| id <= after) {
                continue;
            }
            if vms.len() == MAX_BATCH {
                more = true;
                break;
            }
            let Some(entry) = self.processes.get(number) else {
                continue;
            };
            let Ok(shared) = share(&entry.process) else {
                continue;
            };
            vms.push(Vm {
                id: id.clone(),
                pid: entry.process.pid(),
                shape: entry.shape,
                capabilities: entry.capabilities,
                pooled: false,
            });
            sockets.extend(shared);
        }
        let result = Ok(SpawnReply::Adopted { vms, more });
        self.send(client, &FromSpawn::Response { seq, result }, sockets);
    }

    /// Answered by [`Self::process_ended`]: a client that gets "done" may use the ID again.
    pub(super) fn kill(&mut self, client: u64, seq: u64, id: &SandboxId) -> Result<(), SpawnError> {
        let entry = self
            .live
            .get(id)
            .and_then(|number| self.processes.get_mut(number))
            .ok_or_else(|| SpawnError::Unknown { id: id.clone() })?;
        end(entry);
        entry.killers.push((client, seq));
        Ok(())
    }

    pub(super) fn process_ended(&mut self, number: u64) {
        let Some(entry) = self.processes.get_mut(&number) else {
            return;
        };
        let Some(how) = entry.process.reap() else {
            return;
        };
        match &entry.state {
            State::Making { .. } => self.shell_failed(number, &format!("the VMM ended: {how:?}")),
            State::Ready => {
                let shape = entry.shape;
                let leaf = entry.leaf.take();
                self.shells_lost += self.pools.remove(&shape, |ready| *ready == number) as u64;
                self.processes.remove(&number);
                self.bury(leaf, Vec::new());
            }
            State::Live(id) => {
                let (id, pid) = (id.clone(), entry.process.pid());
                let killers = std::mem::take(&mut entry.killers);
                let leaf = entry.leaf.take();
                self.live.remove(&id);
                self.processes.remove(&number);
                self.bury(leaf, killers);
                self.tell_all(&id, pid, how);
            }
        }
    }

    /// Kills what is left in the cgroup of a VM that has ended, and answers `killers` once it is empty.
    pub(super) fn bury(&mut self, leaf: Option<Leaf>, killers: Vec<(u64, u64)>) {
        let Some(leaf) = leaf else {
            return self.answer_killers(killers);
        };
        leaf.kill();
        self.graves.push(Grave { leaf, killers });
        self.empty_graves();
    }

    pub(super) fn empty_graves(&mut self) {
        let (empty, full) = std::mem::take(&mut self.graves)
            .into_iter()
            .partition(|grave| grave.leaf.remove());
        self.graves = full;
        let empty: Vec<Grave> = empty;
        for grave in empty {
            self.answer_killers(grave.killers);
        }
    }

    pub(super) fn answer_killers(&mut self, killers: Vec<(u64, u64)>) {
        for (client, seq) in killers {
            let result = Ok(SpawnReply::Done);
            self.send(client, &FromSpawn::Response { seq, result }, Vec::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use forkd_types::MiB;
    use forkd_vmm_proto::CpuModel;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

    use super::*;
    use crate::engines::{Engines, Program};
    use crate::server::Settings;

    const SHAPE: Shape = Shape {
        engine: Engine::FORKD,
        memory: MiB(64),
        vcpus: 1,
        cpu: CpuModel::Host,
    };

    /// A server whose VMs never answer, on a host without cgroups.
    fn without_cgroups() -> Server {
        let flags = SocketFlags::CLOEXEC;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let mut engines = Engines::default();
        let program = Program {
            path: "/bin/cat".into(),
            adapted: None,
        };
        engines.add(Engine::FORKD, program);
        let settings = Settings {
            engines,
            parallel: 1,
            max_processes: 4,
        };
        let none = std::io::Error::other("there is no cgroup v2");
        let jails = crate::jail::Jails::none("a test");
        Server::new(settings, listener.unwrap(), Err(none), jails).unwrap()
    }

    #[test]
    fn a_take_whose_limit_cannot_be_kept_starts_nothing() {
        let mut server = without_cgroups();
        let limits = Limits {
            memory_bytes: Some(1 << 30),
            ..Limits::default()
        };
        let ids = vec![SandboxId::from_parts(1, 1)];
        let refused = server.take(1, 1, SHAPE, ids, limits, Jail::default());
        assert!(
            matches!(&refused, Err(SpawnError::NoWall { reason, .. }) if reason.contains("v2")),
            "{refused:?}"
        );
        assert!(server.processes.is_empty());
    }

    #[test]
    fn a_take_into_a_jail_that_does_not_stand_starts_nothing() {
        let mut server = without_cgroups();
        let jail = Jail {
            required: [Wall::Cgroup].into_iter().collect(),
        };
        let ids = vec![SandboxId::from_parts(1, 1)];
        let refused = server.take(1, 1, SHAPE, ids, Limits::default(), jail);
        assert!(
            matches!(refused, Err(SpawnError::NoWall { .. })),
            "{refused:?}"
        );
        assert!(server.processes.is_empty());
    }

    #[test]
    fn a_shape_of_another_engine_starts_nothing() {
        let mut server = without_cgroups();
        let shape = Shape {
            engine: "other".parse().unwrap(),
            ..SHAPE
        };
        let ids = vec![SandboxId::from_parts(1, 1)];
        let refused = server.take(1, 1, shape, ids, Limits::default(), Jail::default());
        assert!(
            matches!(refused, Err(SpawnError::OtherEngine { .. })),
            "{refused:?}"
        );
        assert!(server.processes.is_empty());
    }

    #[test]
    fn the_limits_of_a_vm_that_does_not_live_cannot_be_set() {
        let mut server = without_cgroups();
        let id = SandboxId::from_parts(1, 1);
        let refused = server.set_limits(&id, &Limits::default());
        assert!(
            matches!(refused, Err(SpawnError::Unknown { .. })),
            "{refused:?}"
        );
    }
}
