//! Secrets of owners, and the rules of sandboxes in the broker.
//!
//! A value enters with one request, is sealed into the database, and goes to the broker while a sandbox of its owner has an
//! injection that names it. It leaves the daemon in no other way. [`keep`] starts the broker again when it ends and
//! gives it the rules of every sandbox.

use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, EventKind};
use forkd_net_proto::broker::{Authority, BrokerRule};
use forkd_types::{Policy, SandboxId, SecretName, SecretValue};
use forkd_vmm_link::{Broker, BrokerNews};
use zeroize::Zeroizing;

use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::sandbox::Ask;
use crate::seal::SealError;
use crate::state::{DbError, SandboxRecord, StoredSecret};

/// The most secrets of one owner.
const MAX_SECRETS: u32 = 256;
/// The pause before the broker is started again after a failed start.
const START_AGAIN: Duration = Duration::from_millis(500);
/// The label of the sealed certificate authority. Owners and names have no such text.
const AUTHORITY: &str = "\0authority";

fn label(owner: &str, name: &SecretName) -> String {
    format!("{name}\0{owner}")
}

/// The secrets of an owner, without their values.
pub async fn list(app: &App, owner: &str) -> Result<Vec<StoredSecret>, Error> {
    Ok(app.db.secrets(owner.to_owned()).await?)
}

/// Stores a value, or replaces it. Requests of running sandboxes use it from the answer on.
pub async fn set(
    app: &App,
    owner: &str,
    name: SecretName,
    value: SecretValue,
) -> Result<StoredSecret, Error> {
    let sealed = app
        .seal
        .seal(&label(owner, &name), value.expose().as_bytes())?;
    let _turn = app.secrets_turn.lock().await;
    let (owned, now) = (owner.to_owned(), clock::unix());
    let stored = app
        .db
        .put_secret(owned, name.clone(), sealed, now, MAX_SECRETS)
        .await?;
    let stored = stored.ok_or_else(|| {
        Error::hinted(
            ErrorCode::LimitReached,
            format!("{owner} has {MAX_SECRETS} secrets, which is the limit"),
            "delete one: forkd secret rm NAME",
        )
    })?;
    if let Some(broker) = app.broker.running() {
        broker.set_secret(owner, name, value).await?;
    }
    Ok(stored)
}

/// Forgets a secret. Requests that need it are refused from the answer on.
pub async fn delete(app: &App, owner: &str, name: SecretName) -> Result<(), Error> {
    let _turn = app.secrets_turn.lock().await;
    if !app.db.delete_secret(owner.to_owned(), name.clone()).await? {
        return Err(missing(&name));
    }
    if let Some(broker) = app.broker.running() {
        broker.remove_secret(owner, name).await?;
    }
    Ok(())
}

fn missing(name: &SecretName) -> Error {
    Error::hinted(
        ErrorCode::SecretNotFound,
        format!("there is no secret {name}"),
        format!("create it: forkd secret set {name}"),
    )
}

/// Refuses a policy whose injections cannot be served.
pub async fn check(app: &App, owner: &str, policy: &Policy) -> Result<(), Error> {
    if policy.inject().is_empty() {
        return Ok(());
    }
    if !app.broker.is_installed() {
        return Err(Error::hinted(
            ErrorCode::NetworkUnavailable,
            "this host has no broker of secrets",
            "install forkd-broker beside forkd-controller, or remove the injections",
        ));
    }
    let known = list(app, owner).await?;
    let named = policy.inject().iter().flat_map(|rule| rule.value.secrets());
    for name in named {
        if !known.iter().any(|secret| secret.name == name.as_str()) {
            return Err(missing(name));
        }
    }
    Ok(())
}

/// The placeholder of a secret of an owner.
pub fn placeholder(app: &App, owner: &str, name: &SecretName) -> Result<String, Error> {
    Ok(app.seal.placeholder(&label(owner, name))?)
}

/// The broker, with the certificate authority of this host.
async fn broker(app: &App) -> Result<Arc<Broker>, Error> {
    app.broker
        .connected(
            async || match app.db.secrets_authority().await? {
                None => Ok(None),
                Some(sealed) => {
                    let plain = Zeroizing::new(app.seal.open(AUTHORITY, &sealed)?);
                    let parsed = serde_json::from_slice::<Authority>(&plain);
                    Ok(Some(parsed.map_err(DbError::from)?))
                }
            },
            async |authority: Authority| {
                let plain = serde_json::to_vec(&authority).map_err(DbError::from)?;
                let sealed = app.seal.seal(AUTHORITY, &Zeroizing::new(plain))?;
                Ok(app.db.put_secrets_authority(sealed).await?)
            },
        )
        .await
}

/// The certificate that guests trust.
pub async fn certificate(app: &App) -> Result<Vec<u8>, Error> {
    let broker = broker(app).await?;
    Ok(broker.authority(None).await?.certificate)
}

/// Gives the broker the rules of a sandbox and the values that they name, and links it with the engine. Rules come first:
/// the broker keeps no value that no rule names.
pub async fn provide(app: &App, record: &SandboxRecord) -> Result<(), Error> {
    let rules = rules(record);
    if rules.is_empty() {
        return withdraw(app, &record.id, &record.owner).await;
    }
    let broker = broker(app).await?;
    let _turn = app.secrets_turn.lock().await;
    broker
        .set_rules(&record.id, &record.owner, rules.clone())
        .await?;
    for name in rules.iter().flat_map(|rule| rule.rule.value.secrets()) {
        let sealed = app.db.secret(record.owner.clone(), name.clone()).await?;
        // Without the value, requests are refused.
        let Some(sealed) = sealed else { continue };
        let plain = app.seal.open(&label(&record.owner, name), &sealed)?;
        let text = String::from_utf8(plain).map_err(|_| SealError::Broken)?;
        let value = SecretValue::new(text).map_err(|_| SealError::Broken)?;
        broker
            .set_secret(&record.owner, name.clone(), value)
            .await?;
    }
    app.broker.link(&app.net, &broker).await
}

fn rules(record: &SandboxRecord) -> Vec<BrokerRule> {
    let inject = record.network.inject.iter();
    let rules = inject.filter_map(|inject| {
        Some(BrokerRule {
            rule: inject.rule().ok()?,
            placeholder: inject.placeholder.clone(),
        })
    });
    rules.collect()
}

/// Takes the rules of a sandbox from the broker, if it runs.
pub async fn withdraw(app: &App, id: &SandboxId, owner: &str) -> Result<(), Error> {
    match app.broker.running() {
        Some(broker) => Ok(broker.set_rules(id, owner, Vec::new()).await?),
        None => Ok(()),
    }
}

/// Listens to the broker, and brings it back when it ends while a sandbox needs it.
pub async fn keep(app: Arc<App>) {
    let Some(mut connections) = app.broker.connections() else {
        return;
    };
    loop {
        let mut news = tokio::select! {
            news = connections.recv() => match news {
                Some(news) => news,
                None => return,
            },
            () = app.stopping.cancelled() => return,
        };
        forget_unknown(&app).await;
        tokio::select! {
            // A daemon that stops ends the broker and starts no other.
            biased;
            () = app.stopping.cancelled() => return,
            () = listen(&app, &mut news) => {}
        }
        app.broker.disconnected();
        metrics::counter!("forkd_broker_restarts_total").increment(1);
        tracing::error!("forkd-broker is gone; requests that need a secret are refused");
        bring_back(&app).await;
    }
}

/// Rules of sandboxes that ended while the broker had no controller.
async fn forget_unknown(app: &App) {
    let Some(broker) = app.broker.running() else {
        return;
    };
    for id in broker.list().await.unwrap_or_default() {
        if app.sandboxes.get(&id).is_err() {
            // The next connection tries again.
            let _ = broker.set_rules(&id, "", Vec::new()).await;
        }
    }
}

async fn listen(app: &App, news: &mut BrokerNews) {
    while let Some(refused) = news.next().await {
        metrics::counter!("forkd_broker_refused_total").increment(1 + refused.suppressed);
        if app.sandboxes.get(&refused.id).is_err() {
            continue;
        }
        let more = match refused.suppressed {
            0 => String::new(),
            count => format!("; {count} more before it"),
        };
        let detail = format!(
            "request to {} refused: {}{more}",
            refused.to, refused.reason
        );
        app.events
            .tell(EventKind::NetworkDenied, &refused.id, Some(detail));
    }
}

async fn bring_back(app: &App) {
    let needs: Vec<_> = app
        .sandboxes
        .list()
        .into_iter()
        .filter(|sandbox| !sandbox.record().network.inject.is_empty())
        .collect();
    while !needs.is_empty() {
        match broker(app).await {
            Ok(_) => break,
            Err(error) => tracing::error!(error = error.chain(), "forkd-broker cannot be started"),
        }
        tokio::select! {
            () = tokio::time::sleep(START_AGAIN) => {}
            () = app.stopping.cancelled() => return,
        }
    }
    for sandbox in needs {
        // A sandbox whose queue is full is asked again when the engine is.
        if let Err(error) = sandbox.ask(Ask::CheckNetwork) {
            tracing::warn!(sandbox = %sandbox.id, error = error.chain(), "its secrets are not provided");
        }
    }
}
