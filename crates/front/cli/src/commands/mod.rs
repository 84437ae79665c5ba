//! The subcommands: one file each, with a function `run`, plus modules that several of them share.

mod bench;
mod beside;
mod branch;
mod build;
mod checkpoint;
mod children;
mod cleanup;
mod client_process;
mod completions;
mod cp;
mod doctor;
mod door;
mod eval;
mod exec;
mod export;
mod fork;
mod forward;
mod gateway;
mod hub;
mod image;
mod images;
mod kill;
mod limits;
mod logs;
mod ls;
mod machine;
mod man;
mod mcp;
mod net;
mod node;
mod own_snapshot;
mod parent;
mod ping;
mod pipe;
mod ports;
mod quickstart;
mod rmi;
mod rollback;
mod run;
mod secret;
mod shell;
mod snapshot;
mod snapshot_compact;
mod snapshot_diff;
mod snapshot_info;
mod snapshot_share;
mod spawn;
mod store;
mod token;
mod top;
mod r#where;
mod workspace;

use crate::args::{Cli, Command};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs the parsed command. Its own failures exit with 125 where the exit code is otherwise that of a program.
pub fn run(cli: Cli, ui: &Ui) -> CliResult {
    if cli.command.passes_code_on() {
        return dispatch(cli.command, ui).map_err(|error| error.with_exit(Exit::OURS));
    }
    dispatch(cli.command, ui)
}

fn dispatch(command: Command, ui: &Ui) -> CliResult {
    match command {
        Command::Quickstart(args) => quickstart::run(&args, ui),
        Command::Snapshot(args) => snapshot::run(*args, ui),
        Command::Fork(args) => fork::run(&args, ui),
        Command::Spawn(args) => spawn::run(args, ui),
        Command::Run(args) => run::run(&args, ui),
        Command::Exec(args) => exec::run(&args, ui),
        Command::Eval(args) => eval::run(&args, ui),
        Command::Ping(args) => ping::run(&args, ui),
        Command::Shell(args) => shell::run(args, ui),
        Command::Cp(args) => cp::run(&args, ui),
        Command::Logs(args) => logs::run(&args, ui),
        Command::Ls(args) => ls::run(&args, ui),
        Command::Top(args) => top::run(&args, ui),
        Command::Limits(args) => limits::run(&args, ui),
        Command::Cleanup(args) => cleanup::run(&args, ui),
        Command::Kill(args) => kill::run(args, ui),
        Command::Branch(args) => branch::run(args, ui),
        Command::Checkpoint(args) => checkpoint::run(args, ui),
        Command::Rollback(args) => rollback::run(args, ui),
        Command::Images(args) => images::run(&args, ui),
        Command::Image(args) => image::run(&args, ui),
        Command::Build(args) => build::run(&args, ui),
        Command::Export(args) => export::run(&args, ui),
        Command::FromImage(args) => image::from_image(&args, ui),
        Command::Parent(args) => parent::run(&args, ui),
        Command::Rmi(args) => rmi::run(&args, ui),
        Command::SnapshotInfo(args) => snapshot_info::run(&args, ui),
        Command::SnapshotDiff(args) => snapshot_diff::run(&args, ui),
        Command::SnapshotCompact(args) => snapshot_compact::run(&args, ui),
        Command::SnapshotShare(args) => snapshot_share::run(&args, ui),
        Command::Pack(args) => hub::pack(&args, ui),
        Command::Unpack(args) | Command::Pull(args) => hub::unpack(&args, ui),
        Command::Push(args) => hub::push(&args, ui),
        Command::Store(args) => store::run(&args, ui),
        Command::Net(args) => net::run(args, ui),
        Command::Ports(args) => ports::run(&args, ui),
        Command::Forward(args) => forward::run(&args, ui),
        Command::Workspace(args) => workspace::run(args, ui),
        Command::Secret(args) => secret::run(args, ui),
        Command::Token(args) => token::run(args, ui),
        Command::Node(args) => node::run(args, ui),
        Command::Gateway(args) => gateway::run(&args),
        Command::Bench(args) => bench::run(&args, ui),
        Command::Doctor(args) => doctor::run(&args, ui),
        Command::Mcp(args) => mcp::run(*args, ui),
        Command::Machine(args) => machine::run(args, ui),
        Command::Where(args) => r#where::run(&args, ui),
        Command::Completions(args) => completions::run(&args, ui),
        Command::Man(args) => man::run(&args, ui),
    }
}
