//! The service `filesystem.Filesystem`: entries, directories and watches.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use forkd_agent_client::{Client, Watch};
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;
use tokio::time::{Instant, sleep_until};

use super::connect::{self, Code, Incoming, Outgoing, RpcError, number};
use super::messages::{
    Empty, EntryInfo, EntryResponse, EventType, FileType, FilesystemEvent, ListDirRequest,
    ListDirResponse, MoveRequest, PathRequest, Timestamp, WatchDirResponse, WatchEvent,
    WatchRequest, Watcher, WatcherEvents,
};
use super::paths;
use super::process::no_method;
use super::users::{self, User};
use crate::e2b::state::E2b;
use crate::e2b::target::Reached;
use crate::guest::files;

/// The space of the extended attributes that keep the metadata of files.
pub const METADATA: &str = "user.e2b.";
/// Links of a listing whose targets are looked at.
const MAX_LINKS: usize = 256;
/// Levels of a listing.
const MAX_DEPTH: u32 = 64;
/// How long the one message of a server stream may take to arrive.
const REQUEST_PATIENCE: Duration = Duration::from_secs(30);

/// One call, by its method.
pub async fn call(
    State(e2b): State<Arc<E2b>>,
    Path(method): Path<String>,
    reached: Reached,
    request: Request,
) -> Response {
    let user = users::named(request.headers());
    let guest = match Guest::of(&e2b, reached.sandbox, user).await {
        Ok(guest) => guest,
        // A stream has its result in the last envelope.
        Err(error) if method == "WatchDir" => {
            return connect::stream(request, REQUEST_PATIENCE, |_, outgoing| async move {
                outgoing.finish(Err(error)).await;
            })
            .await;
        }
        Err(error) => return error.into_response(),
    };
    match method.as_str() {
        "Stat" => connect::unary(request, |path: PathRequest| guest.stat(path)).await,
        "MakeDir" => connect::unary(request, |path| guest.make_dir(path)).await,
        "Move" => connect::unary(request, |paths| guest.rename(paths)).await,
        "ListDir" => connect::unary(request, |path| guest.list(path)).await,
        "Remove" => connect::unary(request, |path| guest.remove(path)).await,
        "CreateWatcher" => connect::unary(request, |wish| guest.create_watcher(wish)).await,
        "GetWatcherEvents" => connect::unary(request, |which| guest.watcher_events(which)).await,
        "RemoveWatcher" => connect::unary(request, |which| guest.remove_watcher(which)).await,
        "WatchDir" => {
            let keepalive = number(request.headers(), "keepalive-ping-interval");
            let keepalive = Duration::from_secs(keepalive.unwrap_or(90).min(3600));
            connect::stream(request, REQUEST_PATIENCE, move |incoming, outgoing| {
                guest.watch(incoming, outgoing, keepalive)
            })
            .await
        }
        _ => no_method(&method).into_response(),
    }
}

/// A guest, and the user of the request.
struct Guest {
    e2b: Arc<E2b>,
    sandbox: Arc<SandboxHandle>,
    client: Client,
    user: User,
}

/// The text by which `ls` shows permissions.
pub fn permissions(kind: guest::FileKind, mode: u32) -> String {
    let kind = match kind {
        guest::FileKind::Directory => 'd',
        guest::FileKind::Symlink => 'L',
        guest::FileKind::File | guest::FileKind::Other => '-',
    };
    let bits = (0..9).map(|bit| {
        let letter = ['r', 'w', 'x'][bit % 3];
        if mode & (0o400 >> bit) == 0 {
            '-'
        } else {
            letter
        }
    });
    std::iter::once(kind).chain(bits).collect()
}

/// An entry as the protocol shows it. `target` is the kind of the file that a link points to.
pub fn entry(path: String, info: guest::FileInfo, target: Option<guest::FileKind>) -> EntryInfo {
    let is_symlink = info.kind == guest::FileKind::Symlink;
    let shown = match (is_symlink, target) {
        (true, Some(kind)) => kind,
        (true, None) => guest::FileKind::Symlink,
        (false, _) => info.kind,
    };
    let kind = match shown {
        guest::FileKind::Directory => FileType::Directory,
        guest::FileKind::Symlink => FileType::Symlink,
        // The protocol has no other kind, and the SDKs leave out what has none.
        guest::FileKind::File | guest::FileKind::Other => FileType::File,
    };
    let symlink_target = info.target.map(|target| {
        if target.starts_with('/') {
            paths::clean(&target)
        } else {
            paths::clean(&format!("{}/{target}", paths::parent(&path)))
        }
    });
    EntryInfo {
        name: paths::name(&path),
        r#type: kind as i32,
        path,
        size: i64::try_from(info.size).unwrap_or(i64::MAX),
        mode: info.mode & 0o777,
        permissions: permissions(info.kind, info.mode),
        owner: info.user.unwrap_or_else(|| info.uid.to_string()),
        group: info.group.unwrap_or_else(|| info.gid.to_string()),
        modified_time: Some(Timestamp::of_ms(info.modified_unix_ms)),
        symlink_target,
        metadata: info.attributes,
        is_symlink,
    }
}

/// An entry by its path; a link with the kind of its target.
async fn look(client: &Client, path: String) -> Result<EntryInfo, RpcError> {
    let wish = guest::StatRequest {
        path: path.clone(),
        no_follow: true,
        attributes: Some(METADATA.to_owned()),
    };
    let info = files::stat_with(client, wish).await?;
    let target = match info.kind {
        guest::FileKind::Symlink => files::stat(client, &path, false).await.ok(),
        _ => None,
    };
    Ok(entry(path, info, target.map(|info| info.kind)))
}

impl Guest {
    async fn of(
        e2b: &Arc<E2b>,
        sandbox: Arc<SandboxHandle>,
        wanted: Option<String>,
    ) -> Result<Self, RpcError> {
        let client = sandbox.agent().await?;
        let state = e2b.of(&sandbox.id);
        let user = state
            .users
            .find(&client, wanted.as_deref())
            .await
            .map_err(|error| RpcError::new(Code::Unauthenticated, error.to_string()))?;
        Ok(Self {
            e2b: Arc::clone(e2b),
            sandbox,
            client,
            user,
        })
    }

    fn path(&self, text: &str) -> Result<String, RpcError> {
        paths::resolve(text, &self.user).ok_or_else(|| RpcError::invalid("the path is not valid"))
    }

    async fn entry(&self, path: String) -> Result<EntryResponse, RpcError> {
        let entry = look(&self.client, path).await?;
        Ok(EntryResponse { entry: Some(entry) })
    }

    async fn stat(&self, request: PathRequest) -> Result<EntryResponse, RpcError> {
        self.entry(self.path(&request.path)?).await
    }

    /// Makes a directory and its missing parents, for the user.
    async fn make_dir(&self, request: PathRequest) -> Result<EntryResponse, RpcError> {
        let path = self.path(&request.path)?;
        match files::stat(&self.client, &path, false).await {
            Ok(found) if found.kind == guest::FileKind::Directory => {
                return Err(RpcError::new(
                    Code::AlreadyExists,
                    format!("directory already exists: {path}"),
                ));
            }
            Ok(_) => {
                return Err(RpcError::invalid(format!(
                    "path already exists but is not a directory: {path}"
                )));
            }
            Err(_) => {}
        }
        make_dirs(&self.client, &path, &self.user.name).await?;
        self.entry(path).await
    }

    async fn rename(&self, request: MoveRequest) -> Result<EntryResponse, RpcError> {
        let from = self.path(&request.source)?;
        let to = self.path(&request.destination)?;
        files::stat(&self.client, &from, true).await?;
        make_dirs(&self.client, paths::parent(&to), &self.user.name).await?;
        self.client
            .by(agent_limits::answer())
            .rename(guest::RenameRequest {
                from: from.clone(),
                to: to.clone(),
                no_replace: false,
            })
            .await
            .map_err(Error::agent(format!("{from} cannot be renamed")))?;
        self.entry(to).await
    }

    async fn list(&self, request: ListDirRequest) -> Result<ListDirResponse, RpcError> {
        let path = self.path(&request.path)?;
        let found = files::stat(&self.client, &path, false).await?;
        if found.kind != guest::FileKind::Directory {
            return Err(RpcError::invalid(format!(
                "path is not a directory: {path}"
            )));
        }
        let depth = request.depth.clamp(1, MAX_DEPTH);
        let listed = files::list(&self.client, &path, depth, Some(METADATA)).await?;
        let base = if path == "/" { "" } else { path.as_str() };
        let mut links = 0;
        let mut entries = Vec::with_capacity(listed.len());
        for found in listed {
            let whole = format!("{base}/{}", found.path);
            let mut target = None;
            if found.info.kind == guest::FileKind::Symlink && links < MAX_LINKS {
                links += 1;
                let info = files::stat(&self.client, &whole, false).await.ok();
                target = info.map(|info| info.kind);
            }
            entries.push(entry(whole, found.info, target));
        }
        // The protocol lists a directory directly before its content.
        entries.sort_by(|a, b| a.path.split('/').cmp(b.path.split('/')));
        Ok(ListDirResponse { entries })
    }

    async fn remove(&self, request: PathRequest) -> Result<Empty, RpcError> {
        let path = self.path(&request.path)?;
        self.client
            .by(agent_limits::start())
            .remove(guest::RemoveRequest {
                path: path.clone(),
                recursive: true,
                missing_ok: true,
            })
            .await
            .map_err(Error::agent(format!("{path} cannot be removed")))?;
        Ok(Empty {})
    }

    /// Begins to watch a directory.
    async fn open_watch(&self, request: &WatchRequest) -> Result<(Watch, String), RpcError> {
        let path = self.path(&request.path)?;
        let found = files::stat(&self.client, &path, false).await?;
        if found.kind != guest::FileKind::Directory {
            return Err(RpcError::invalid(format!(
                "path is not a directory: {path}"
            )));
        }
        let watch = self
            .client
            .by(agent_limits::start())
            .watch(guest::WatchRequest {
                path: path.clone(),
                recursive: request.recursive,
            })
            .await
            .map_err(Error::agent(format!("{path} cannot be watched")))?;
        Ok((watch, path))
    }

    async fn watch(self, mut incoming: Incoming, outgoing: Outgoing, keepalive: Duration) {
        let opened = async {
            let request = incoming.next::<WatchRequest>().await?;
            let request = request.ok_or_else(|| RpcError::invalid("the request is missing"))?;
            let (watch, path) = self.open_watch(&request).await?;
            Ok::<_, RpcError>((watch, path, request.include_entry))
        };
        let (mut watch, path, include) = match opened.await {
            Ok(opened) => opened,
            Err(error) => return outgoing.finish(Err(error)).await,
        };
        let mut message = WatchDirResponse::of(WatchEvent::Start(Empty {}));
        loop {
            if outgoing.send(&message).await.is_err() {
                return;
            }
            let silent = Instant::now() + keepalive;
            let changes = tokio::select! {
                changes = watch.next() => changes,
                () = sleep_until(silent) => {
                    message = WatchDirResponse::of(WatchEvent::Keepalive(Empty {}));
                    continue;
                }
                () = outgoing.closed() => return,
            };
            let Ok(changes) = changes else {
                return outgoing.break_off().await;
            };
            let mut events = Vec::new();
            for change in changes {
                events.extend(event(&self.client, &path, change, include).await);
            }
            let Some(last) = events.pop() else {
                message = WatchDirResponse::of(WatchEvent::Keepalive(Empty {}));
                continue;
            };
            for event in events {
                let message = WatchDirResponse::of(WatchEvent::Filesystem(event));
                if outgoing.send(&message).await.is_err() {
                    return;
                }
            }
            message = WatchDirResponse::of(WatchEvent::Filesystem(last));
        }
    }

    async fn create_watcher(&self, request: WatchRequest) -> Result<Watcher, RpcError> {
        let (watch, path) = self.open_watch(&request).await?;
        let state = self.e2b.of(&self.sandbox.id);
        let client = self.client.clone();
        let watcher_id = state
            .watchers
            .add(watch, client, path, request.include_entry)?;
        Ok(Watcher { watcher_id })
    }

    async fn watcher_events(&self, which: Watcher) -> Result<WatcherEvents, RpcError> {
        // Changes that happened before this call are reported before the answer to the ping.
        let _ = self.client.by(agent_limits::ping()).ping().await;
        let state = self.e2b.of(&self.sandbox.id);
        let events = state.watchers.take(&which.watcher_id).await?;
        Ok(WatcherEvents { events })
    }

    async fn remove_watcher(&self, which: Watcher) -> Result<Empty, RpcError> {
        self.e2b
            .of(&self.sandbox.id)
            .watchers
            .remove(&which.watcher_id)?;
        Ok(Empty {})
    }
}

/// Makes a directory and its missing parents, each for the user.
pub async fn make_dirs(client: &Client, path: &str, owner: &str) -> Result<(), RpcError> {
    let mut missing = Vec::new();
    let mut at = path;
    while at != "/" && files::stat(client, at, false).await.is_err() {
        missing.push(at);
        at = paths::parent(at);
    }
    for path in missing.into_iter().rev() {
        client
            .by(agent_limits::answer())
            .mkdir(guest::MkdirRequest {
                path: path.to_owned(),
                parents: true,
                mode: None,
                owner: Some(owner.to_owned()),
            })
            .await
            .map_err(Error::agent(format!("{path} cannot be made")))?;
    }
    Ok(())
}

/// A change as the protocol shows it.
pub async fn event(
    client: &Client,
    watched: &str,
    change: guest::WatchEvent,
    include_entry: bool,
) -> Option<FilesystemEvent> {
    use guest::WatchChange as C;
    let kind = match change.change {
        C::Created | C::MovedIn => EventType::Create,
        C::Modified => EventType::Write,
        C::Attributes => EventType::Chmod,
        C::Removed => EventType::Remove,
        C::MovedOut => EventType::Rename,
        C::Written | C::Overflow | C::Unknown => return None,
    };
    let exists = matches!(
        kind,
        EventType::Create | EventType::Write | EventType::Chmod
    );
    let mut entry = None;
    if include_entry && exists {
        let path = paths::clean(&format!("{watched}/{}", change.path));
        entry = look(client, path).await.ok();
    }
    Some(FilesystemEvent {
        name: change.path,
        r#type: kind as i32,
        entry,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_shown_as_by_ls() {
        use guest::FileKind as K;
        assert_eq!(permissions(K::File, 0o644), "-rw-r--r--");
        assert_eq!(permissions(K::Directory, 0o40755), "drwxr-xr-x");
        assert_eq!(permissions(K::Symlink, 0o777), "Lrwxrwxrwx");
    }

    #[test]
    fn a_link_has_the_kind_of_its_target() {
        let info = |kind, target: Option<&str>| guest::FileInfo {
            kind,
            size: 1,
            mode: 0o777,
            uid: 0,
            gid: 0,
            user: None,
            group: None,
            modified_unix_ms: 0,
            target: target.map(str::to_owned),
            attributes: Default::default(),
        };
        let link = info(guest::FileKind::Symlink, Some("b"));
        let shown = entry("/d/a".into(), link.clone(), Some(guest::FileKind::File));
        assert_eq!(shown.r#type, FileType::File as i32);
        assert_eq!(shown.symlink_target.as_deref(), Some("/d/b"));
        assert!(shown.is_symlink);
        let dangling = entry("/d/a".into(), link, None);
        assert_eq!(dangling.r#type, FileType::Symlink as i32);
    }
}
