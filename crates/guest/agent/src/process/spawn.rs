//! From an exec request to a child with its descriptors.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::{Command, Stdio};

use forkd_guest_proto::{AgentError, ErrorCode, ExecRequest, PtySize};
use rustix::fs::OFlags;
use rustix::pipe::PipeFlags;
use rustix::pty::OpenptFlags;
use tokio::io::unix::AsyncFd;

use super::defaults::Defaults;
use super::reaper::{Child, Reaper};
use super::users::{User, Users};
use crate::error;
use crate::sys;

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// `KEY=VALUE` lines that every process starts with; an image puts its own environment there.
const ENV_FILE: &str = "/etc/forkd/env";

/// A child and our ends of its descriptors.
pub struct Spawned {
    pub child: Child,
    pub stdin: Option<AsyncFd<OwnedFd>>,
    pub stdout: AsyncFd<OwnedFd>,
    pub stderr: Option<AsyncFd<OwnedFd>>,
    pub pty: bool,
    pub argv: Vec<String>,
    pub cwd: String,
}

/// Starts what a request asks for.
pub fn spawn(
    reaper: &Reaper,
    cgroup: Option<BorrowedFd<'_>>,
    request: &ExecRequest,
) -> Result<Spawned, AgentError> {
    spawn_with(reaper, cgroup, request, None)
}

/// Starts what a request asks for, with a descriptor of ours as its standard input.
pub fn spawn_with(
    reaper: &Reaper,
    cgroup: Option<BorrowedFd<'_>>,
    request: &ExecRequest,
    stdin: Option<OwnedFd>,
) -> Result<Spawned, AgentError> {
    let argv = argv(request)?;
    let defaults = Defaults::of_image();
    let user = request
        .user
        .as_deref()
        .or(defaults.user.as_deref())
        .map(|user| Users::load().find(user))
        .transpose()?;
    let mut command = command(request, &argv, user.as_ref())?;
    let cwd = cwd(request, defaults, user.as_ref());
    command.current_dir(&cwd);
    let ends = match request.pty {
        Some(size) => Ends::pty(&mut command, size),
        None => Ends::pipes(&mut command, request.stdin),
    };
    if let Some(stdin) = stdin {
        command.stdin(stdin);
    }
    let ends = ends.map_err(|error| error::io("cannot open the process's descriptors", &error))?;
    let setup = sys::ChildSetup {
        controlling_terminal: request.pty.is_some(),
        identity: user.map(|user| (user.uid, user.gid, user.groups)),
        rlimits: request.rlimits.clone(),
        cgroup: cgroup
            .map(|fd| fd.try_clone_to_owned())
            .transpose()
            .ok()
            .flatten(),
    };
    sys::prepare_child(&mut command, setup);
    let child = reaper
        .spawn(&mut command)
        .map_err(|error| exec_error(&argv, &cwd, &error))?;
    // The command holds the child's ends; they must be closed here or the end of output never comes.
    drop(command);
    let register = |error: io::Error| error::io("cannot watch the process's descriptors", &error);
    Ok(Spawned {
        child,
        stdin: ends.stdin.map(sys::watched).transpose().map_err(register)?,
        stdout: sys::watched(ends.stdout).map_err(register)?,
        stderr: ends
            .stderr
            .map(sys::watched)
            .transpose()
            .map_err(register)?,
        pty: request.pty.is_some(),
        argv,
        cwd,
    })
}

fn argv(request: &ExecRequest) -> Result<Vec<String>, AgentError> {
    let argv = match (&request.shell, request.argv.is_empty()) {
        (Some(line), true) => vec!["/bin/sh".to_owned(), "-c".to_owned(), line.clone()],
        (None, false) => request.argv.clone(),
        _ => return Err(error::bad("exactly one of argv and shell is needed")),
    };
    let texts = argv.iter().chain(request.env.iter().map(|(key, _)| key));
    if texts
        .chain(request.cwd.iter())
        .any(|text| text.contains('\0'))
    {
        return Err(error::bad("argv, env and cwd cannot hold zero bytes"));
    }
    Ok(argv)
}

fn command(
    request: &ExecRequest,
    argv: &[String],
    user: Option<&User>,
) -> Result<Command, AgentError> {
    let (program, arguments) = argv
        .split_first()
        .ok_or_else(|| error::bad("argv is empty"))?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear();
    if !request.clear_env {
        command.env("PATH", PATH).env("LANG", "C.UTF-8");
        let home = user.map_or_else(|| "/root".into(), |user| user.home.clone());
        command.env("HOME", home);
        let name = user.map_or("root", |user| user.name.as_str());
        command.env("USER", name).env("LOGNAME", name);
        command.env("SHELL", user.map_or("/bin/sh", |user| user.shell.as_str()));
        if request.pty.is_some() {
            command.env("TERM", "xterm-256color");
        }
        for (key, value) in image_env() {
            command.env(key, value);
        }
    }
    for (key, value) in &request.env {
        if key.is_empty() || key.contains('=') {
            return Err(error::bad(format!(
                "{key:?} cannot be the name of a variable"
            )));
        }
        match value {
            Some(value) if value.contains('\0') => {
                return Err(error::bad(format!("the value of {key} holds a zero byte")));
            }
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    Ok(command)
}

fn image_env() -> Vec<(OsString, OsString)> {
    let file = fs::read(ENV_FILE).unwrap_or_default();
    let lines = file.split(|byte| *byte == b'\n').filter_map(|line| {
        let at = line
            .iter()
            .position(|byte| *byte == b'=')
            .filter(|at| *at > 0)?;
        let (key, value) = line.split_at(at);
        let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        Some((text(key), text(value.get(1..)?)))
    });
    lines
        .filter(|(_, value)| !value.as_bytes().contains(&0))
        .collect()
}

fn cwd(request: &ExecRequest, defaults: &Defaults, user: Option<&User>) -> String {
    if let Some(cwd) = request.cwd.as_ref().or(defaults.cwd.as_ref()) {
        return cwd.clone();
    }
    let home = user.map_or("/root".as_ref(), |user| user.home.as_path());
    if home.is_dir() {
        home.to_string_lossy().into_owned()
    } else {
        "/".to_owned()
    }
}

fn exec_error(argv: &[String], cwd: &str, error: &io::Error) -> AgentError {
    let program = argv.first().map_or("", String::as_str);
    let message = if fs::metadata(cwd).is_ok_and(|meta| meta.is_dir()) {
        format!("cannot run {program}: {error}")
    } else {
        format!("cannot run {program} in {cwd}: {error}")
    };
    let code = match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOMEM) => ErrorCode::Limit,
        _ => ErrorCode::ExecFailed,
    };
    AgentError {
        code,
        message,
        errno: error.raw_os_error(),
    }
}

struct Ends {
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: Option<OwnedFd>,
}

impl Ends {
    fn pipes(command: &mut Command, stdin: bool) -> io::Result<Self> {
        let (stdout, child_out) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr, child_err) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        command.stdout(child_out).stderr(child_err);
        let stdin = if stdin {
            let (child_in, stdin) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
            command.stdin(child_in);
            nonblocking(&stdin)?;
            Some(stdin)
        } else {
            command.stdin(Stdio::null());
            None
        };
        nonblocking(&stdout)?;
        nonblocking(&stderr)?;
        Ok(Self {
            stdin,
            stdout,
            stderr: Some(stderr),
        })
    }

    fn pty(command: &mut Command, size: PtySize) -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&master)?;
        set_size(master.as_fd(), size.rows, size.cols)?;
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        command
            .stdin(slave.try_clone()?)
            .stdout(slave.try_clone()?)
            .stderr(slave);
        nonblocking(&master)?;
        let stdin = master.try_clone()?;
        Ok(Self {
            stdin: Some(stdin),
            stdout: master,
            stderr: None,
        })
    }
}

/// Tells a terminal its size.
pub fn set_size(terminal: BorrowedFd<'_>, rows: u16, cols: u16) -> io::Result<()> {
    let size = rustix::termios::Winsize {
        ws_row: rows,
        ws_col: cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}

fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_setfl(
        fd,
        rustix::fs::fcntl_getfl(fd)? | OFlags::NONBLOCK,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_one_way_to_run() {
        let both = ExecRequest {
            argv: vec!["a".into()],
            shell: Some("b".into()),
            ..Default::default()
        };
        assert_eq!(argv(&both).unwrap_err().code, ErrorCode::BadRequest);
        assert_eq!(
            argv(&ExecRequest::default()).unwrap_err().code,
            ErrorCode::BadRequest
        );
        let zero = ExecRequest {
            argv: vec!["a\0b".into()],
            ..Default::default()
        };
        assert_eq!(argv(&zero).unwrap_err().code, ErrorCode::BadRequest);
        let shell = ExecRequest {
            shell: Some("ls".into()),
            ..Default::default()
        };
        assert_eq!(argv(&shell).unwrap(), ["/bin/sh", "-c", "ls"]);
    }
}
