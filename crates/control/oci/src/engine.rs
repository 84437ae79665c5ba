//! Images of a container engine on this host, over its socket: `GET /images/NAME/get`.

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::Url;

use crate::error::OciError;

/// An engine may pack an image for a while before it sends the first byte.
const SILENCE: Duration = Duration::from_secs(300);

/// A container engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Docker,
    Podman,
}

impl Engine {
    /// The kind of source, as users write it.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Docker => "docker-daemon",
            Self::Podman => "podman",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Docker => "Docker",
            Self::Podman => "Podman",
        }
    }

    /// The socket that the environment names, or the usual one.
    fn socket(self) -> PathBuf {
        let (variable, usual) = match self {
            Self::Docker => ("DOCKER_HOST", "/var/run/docker.sock"),
            Self::Podman => ("CONTAINER_HOST", "/run/podman/podman.sock"),
        };
        let given = std::env::var(variable).ok();
        if let Some(path) = given
            .as_deref()
            .and_then(|text| text.strip_prefix("unix://"))
        {
            return path.into();
        }
        if self == Self::Podman
            && let Some(folder) = std::env::var_os("XDG_RUNTIME_DIR")
        {
            let own = PathBuf::from(folder).join("podman/podman.sock");
            if own.exists() {
                return own;
            }
        }
        usual.into()
    }
}

/// The image as the archive that `docker save` writes.
pub fn export(engine: Engine, name: &str) -> Result<impl Read, OciError> {
    let socket = engine.socket();
    let failed = |source: reqwest::Error| OciError::Engine {
        engine: engine.name(),
        socket: socket.clone(),
        source: source.without_url(),
    };
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let http = reqwest::blocking::Client::builder()
        .unix_socket(socket.as_path())
        .no_proxy()
        .tls_certs_only([])
        .timeout(SILENCE)
        .build()
        .map_err(failed)?;
    let refused = |status| OciError::EngineImage {
        engine: engine.name(),
        name: name.chars().take(200).collect(),
        status,
    };
    // The name stands between slashes, and may have some of its own: both engines take them as they are.
    let mut url = Url::parse("http://engine/images").map_err(|_| refused(0))?;
    if let Ok(mut path) = url.path_segments_mut() {
        path.extend(name.split('/')).push("get");
    }
    let answer = http.get(url).send().map_err(failed)?;
    match answer.status().as_u16() {
        200 => Ok(answer),
        status => Err(refused(status)),
    }
}
