//! Checks what a recipe says about the time between the boot of a parent and its cut.

use forkd_formats::image::Warmup;
use forkd_formats::prepare::{Check, Command, Preparation, Ready, Service, Settle, WarmupStep};

use super::super::file::{ServiceTable, WarmupTable};
use super::{Checked, Checker, MAX_ENTRIES, is_name};

/// Services, and conditions of one service.
const MAX_SERVICES: usize = 32;
/// Bytes of a command with its arguments.
const MAX_COMMAND: usize = 64 << 10;
const TIMEOUT: std::ops::RangeInclusive<u32> = 1..=3600;
const DEFAULT_TIMEOUT: u32 = 120;

impl Checker<'_> {
    fn command(&self, exec: &[String], field: &str) -> Checked<()> {
        let bytes: usize = exec.iter().map(|part| part.len() + 1).sum();
        if exec.first().is_none_or(String::is_empty) {
            return Err(self.wrong(format!("{field}.exec"), "is empty"));
        }
        if bytes > MAX_COMMAND || exec.iter().any(|part| part.contains('\0')) {
            let problem = format!("has more than {MAX_COMMAND} bytes, or a zero byte");
            return Err(self.wrong(format!("{field}.exec"), problem));
        }
        Ok(())
    }

    fn timeout(&self, seconds: u32, field: &str) -> Checked<u32> {
        self.between(
            &format!("{field}.timeout_secs"),
            seconds,
            *TIMEOUT.start(),
            *TIMEOUT.end(),
        )
    }

    fn whole_command(&self, command: Command, field: &str) -> Checked<Command> {
        self.command(&command.exec, field)?;
        self.timeout(command.timeout_secs, field)?;
        for (name, value) in &command.env {
            self.variable(&format!("{field}.env"), name, value)?;
        }
        Ok(command)
    }

    fn service(&self, table: ServiceTable, field: &str) -> Checked<Service> {
        if !is_name(&table.name) {
            return Err(self.wrong(format!("{field}.name"), "is not a name"));
        }
        self.command(&table.exec, field)?;
        for (name, value) in &table.env {
            self.variable(&format!("{field}.env"), name, value)?;
        }
        self.bounded(&format!("{field}.ready"), table.ready.len(), MAX_SERVICES)?;
        for (at, ready) in table.ready.iter().enumerate() {
            let field = format!("{field}.ready[{at}]");
            match ready {
                Ready::Port(0) => return Err(self.wrong(field, "has port 0")),
                Ready::Port(_) => {}
                Ready::File(path) => drop(self.inside(path, &field)?),
                Ready::Exec(exec) => self.command(exec, &field)?,
                Ready::Log(text) if text.is_empty() || text.contains(['\n', '\0']) => {
                    return Err(self.wrong(field, "has a log text that is empty, or not one line"));
                }
                Ready::Log(_) => {}
            }
        }
        let timeout = self.timeout(table.timeout_secs.unwrap_or(DEFAULT_TIMEOUT), field)?;
        Ok(table.into_service(timeout))
    }

    fn warmup(&self, table: WarmupTable, field: &str) -> Checked<WarmupStep> {
        match (table.interpreter, table.exec) {
            (Some(interpreter), None) => Ok(WarmupStep::Interpreter(Warmup {
                interpreter,
                imports: table.imports,
                code: table.code,
            })),
            (None, Some(exec)) => {
                if !table.imports.is_empty() || !table.code.is_empty() {
                    return Err(self.wrong(field, "has imports or code without an interpreter"));
                }
                let command = Command {
                    exec,
                    user: table.user,
                    cwd: table.cwd,
                    env: table.env,
                    timeout_secs: table.timeout_secs.unwrap_or(DEFAULT_TIMEOUT),
                };
                Ok(WarmupStep::Exec(self.whole_command(command, field)?))
            }
            _ => Err(self.wrong(field, "needs either interpreter or exec")),
        }
    }

    /// Adds to the preparation of the recipe below.
    pub(super) fn prepare(
        &self,
        prepare: &mut Preparation,
        run: Vec<Command>,
        services: Vec<ServiceTable>,
        warmup: Vec<WarmupTable>,
        settle: Option<Settle>,
        check: Option<Check>,
    ) -> Checked<()> {
        self.bounded("run", run.len(), MAX_ENTRIES)?;
        for (at, command) in run.into_iter().enumerate() {
            prepare
                .run
                .push(self.whole_command(command, &format!("run[{at}]"))?);
        }
        self.bounded("service", services.len(), MAX_SERVICES)?;
        for (at, table) in services.into_iter().enumerate() {
            let field = format!("service[{at}]");
            let service = self.service(table, &field)?;
            if prepare
                .services
                .iter()
                .any(|known| known.name == service.name)
            {
                return Err(self.wrong(format!("{field}.name"), "is the name of another service"));
            }
            prepare.services.push(service);
        }
        self.bounded("warmup", warmup.len(), MAX_ENTRIES)?;
        for (at, table) in warmup.into_iter().enumerate() {
            add_warmup(prepare, self.warmup(table, &format!("warmup[{at}]"))?);
        }
        if let Some(settle) = settle {
            self.between("settle.busy_percent", settle.busy_percent.into(), 1, 100)?;
            self.between("settle.for_ms", settle.for_ms, 50, 10_000)?;
            self.timeout(settle.timeout_secs, "settle")?;
            prepare.settle = Some(settle);
        }
        if let Some(check) = check {
            self.command(&check.exec, "check")?;
            self.timeout(check.timeout_secs, "check")?;
            prepare.check = Some(check);
        }
        Ok(())
    }
}

/// Adds a step. A language has one interpreter: what a recipe adds to the warm-up of the recipe below runs in the same.
fn add_warmup(prepare: &mut Preparation, step: WarmupStep) {
    if let WarmupStep::Interpreter(new) = &step {
        let same = prepare.warmup.iter_mut().find_map(|known| match known {
            WarmupStep::Interpreter(known) if known.interpreter == new.interpreter => Some(known),
            _ => None,
        });
        if let Some(known) = same {
            known.imports.extend(new.imports.iter().cloned());
            known.code = format!("{}\n{}", known.code, new.code);
            return;
        }
    }
    prepare.warmup.push(step);
}
