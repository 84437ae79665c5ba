//! A registry that lies, breaks off, loops or never ends: each pull ends with a named error, or with the right bytes.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};

use forkd_oci::OciError;
use forkd_oci::auth::{Credential, Secret};
use forkd_oci::digest::Digest;
use forkd_oci::registries::Registries;
use forkd_oci::registry::RegistryError;
use support::{Answer, Body, Example, Server, files, pull, pull_with, registries};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn is_first_layer(path: &str) -> bool {
    path.ends_with(&Digest::of(&Example::new().layers[0]).to_string())
}

fn password() -> Credential {
    Credential::Password {
        username: "user".into(),
        password: Secret::new("open sesame".into()),
    }
}

#[test]
fn an_honest_registry_gives_the_image() {
    let example = Example::new();
    let manifest = Digest::of(&example.manifest);
    let server = Server::start(move |request| Example::new().answer(request));
    let at = folder();
    let image = pull(&format!("{}/app:1", server.host), at.path()).unwrap();
    assert_eq!(image.digest, manifest);
    assert_eq!(image.layers.len(), 3);
    for (layer, bytes) in image.layers.iter().zip(&example.layers) {
        assert_eq!(&layer.blob.read().unwrap(), bytes);
    }
    let before = server.count("/blobs/");
    // Layers that are here are not asked for again: only the configuration is.
    pull(&format!("{}/app@{manifest}", server.host), at.path()).unwrap();
    assert_eq!(server.count("/blobs/"), before + 1);
}

#[test]
fn wrong_bytes_are_refused_and_leave_nothing() {
    let server = Server::start(|request| {
        let mut answer = Example::new().answer(request);
        if let (true, Body::Whole(bytes)) = (is_first_layer(&request.path), &mut answer.body) {
            bytes[7] ^= 1;
        }
        answer
    });
    let at = folder();
    let error = pull(&format!("{}/app:1", server.host), at.path()).unwrap_err();
    assert!(
        matches!(error, RegistryError::Image(OciError::Digest { .. })),
        "{error}"
    );
    let layer = Digest::of(&Example::new().layers[0]).hex();
    assert!(!files(at.path()).iter().any(|name| name.starts_with(&layer)));
}

#[test]
fn another_manifest_than_pinned_is_refused() {
    let server = Server::start(|_| Answer::ok(Example::new().manifest));
    let at = folder();
    let other = Digest::of(b"other");
    let error = pull(&format!("{}/app@{other}", server.host), at.path()).unwrap_err();
    assert!(
        matches!(error, RegistryError::Image(OciError::Digest { .. })),
        "{error}"
    );
}

#[test]
fn a_blob_that_breaks_off_is_resumed() {
    let server = Server::start(|request| {
        let answer = Example::new().answer(request);
        match answer.body {
            Body::Whole(bytes) if is_first_layer(&request.path) && bytes.len() > 500_000 => {
                let cut = bytes.len() / 2;
                Answer {
                    body: Body::Cut(bytes, cut),
                    ..answer
                }
            }
            _ => answer,
        }
    });
    let at = folder();
    let image = pull(&format!("{}/app:1", server.host), at.path()).unwrap();
    assert_eq!(
        image.layers[0].blob.read().unwrap(),
        Example::new().layers[0]
    );
    let seen = server.seen();
    let asked: Vec<_> = seen
        .iter()
        .filter(|one| is_first_layer(&one.path))
        .collect();
    assert!(
        asked.len() >= 2 && asked[1].headers.contains_key("range"),
        "{asked:?}"
    );
}

#[test]
fn a_blob_that_always_breaks_off_is_given_up() {
    let server = Server::start(|request| {
        let answer = Example::new().answer(request);
        match answer.body {
            Body::Whole(bytes) if is_first_layer(&request.path) => Answer {
                body: Body::Cut(bytes, 0),
                ..answer
            },
            _ => answer,
        }
    });
    let at = folder();
    let error = pull(&format!("{}/app:1", server.host), at.path()).unwrap_err();
    assert!(matches!(error, RegistryError::Truncated { .. }), "{error}");
    assert!(server.count("/blobs/") < 50);
}

#[test]
fn a_part_with_wrong_bytes_is_fetched_anew() {
    let server = Server::start(|request| Example::new().answer(request));
    let at = folder();
    let layer = Digest::of(&Example::new().layers[0]).hex();
    std::fs::write(at.path().join(format!("{layer}.part")), "wrong").unwrap();
    let image = pull(&format!("{}/app:1", server.host), at.path()).unwrap();
    assert_eq!(
        image.layers[0].blob.read().unwrap(),
        Example::new().layers[0]
    );
}

#[test]
fn a_blob_that_changed_on_disk_is_fetched_anew() {
    let server = Server::start(|request| Example::new().answer(request));
    let at = folder();
    pull(&format!("{}/app:1", server.host), at.path()).unwrap();
    let layer = Digest::of(&Example::new().layers[0]).hex();
    std::fs::write(at.path().join(&layer), "wrong").unwrap();
    let image = pull(&format!("{}/app:1", server.host), at.path()).unwrap();
    assert_eq!(
        image.layers[0].blob.read().unwrap(),
        Example::new().layers[0]
    );
}

#[test]
fn what_never_ends_is_cut_off() {
    for endless in ["manifests", "config", "layer"] {
        let server = Server::start(move |request| {
            let answer = Example::new().answer(request);
            let config = Digest::of(&Example::new().config).to_string();
            let hit = match endless {
                "config" => request.path.ends_with(&config),
                "layer" => is_first_layer(&request.path),
                _ => request.path.contains("manifests"),
            };
            if hit {
                return Answer {
                    body: Body::Endless,
                    ..Answer::ok("")
                };
            }
            answer
        });
        let at = folder();
        let error = pull(&format!("{}/app:1", server.host), at.path()).unwrap_err();
        assert!(
            matches!(error, RegistryError::TooLong { .. }),
            "{endless}: {error}"
        );
    }
}

#[test]
fn a_manifest_without_sizes_and_one_with_too_much_are_refused() {
    let digest = Digest::of(b"");
    for (layer, problem) in [
        (
            format!(r#"{{"digest":"{digest}"}}"#),
            "does not say the size",
        ),
        (
            format!(r#"{{"digest":"{digest}","size":{}}}"#, u64::MAX),
            "cannot be used",
        ),
    ] {
        let config = Example::new().config;
        let manifest = format!(
            r#"{{"config":{{"digest":"{}","size":1}},"layers":[{layer},{layer}]}}"#,
            Digest::of(&config)
        );
        let server = Server::start(move |request| {
            if request.path.contains("/blobs/") {
                return Answer::ok(config.clone());
            }
            Answer::ok(manifest.clone())
        });
        let error = pull(&format!("{}/app:1", server.host), folder().path()).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
    }
}

#[test]
fn a_loop_of_redirects_ends() {
    let server =
        Server::start(|request| Answer::status(307).with("location", request.path.clone()));
    let error = pull(&format!("{}/app:1", server.host), folder().path()).unwrap_err();
    assert!(matches!(error, RegistryError::Redirects { .. }), "{error}");
    assert!(server.seen().len() <= 6);
}

#[test]
fn a_redirect_to_another_scheme_is_refused() {
    let server = Server::start(|_| Answer::status(302).with("location", "file:///etc/passwd"));
    let error = pull(&format!("{}/app:1", server.host), folder().path()).unwrap_err();
    assert!(matches!(error, RegistryError::Redirect { .. }), "{error}");
}

#[test]
fn a_login_does_not_follow_a_redirect_to_another_host() {
    let content = Server::start(|request| Example::new().answer(request));
    let to = content.host.clone();
    let server = Server::start(move |request| {
        if !request.headers.contains_key("authorization") {
            return Answer::status(401).with("www-authenticate", "Basic realm=\"x\"");
        }
        if request.path.contains("/blobs/") {
            return Answer::status(307).with("location", format!("http://{to}{}", request.path));
        }
        Example::new().answer(request)
    });
    let name = format!("{}/app:1", server.host);
    let at = folder();
    pull_with(&name, &Registries::default(), Some(password()), at.path()).unwrap();
    assert!(content.count("/blobs/") > 0);
    assert!(
        content
            .seen()
            .iter()
            .all(|one| !one.headers.contains_key("authorization"))
    );
}

#[test]
fn a_login_that_never_succeeds_ends() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        if request.path.starts_with("/token") {
            let number = asked.fetch_add(1, Ordering::Relaxed);
            return Answer::ok(format!(r#"{{"token":"t{number}"}}"#));
        }
        let host = &request.headers["host"];
        let header = format!("Bearer realm=\"http://{host}/token\",service=\"s\"");
        Answer::status(401).with("www-authenticate", header)
    });
    let name = format!("{}/app:1", server.host);
    let at = folder();
    let error = pull_with(&name, &Registries::default(), Some(password()), at.path()).unwrap_err();
    assert!(
        matches!(
            error,
            RegistryError::Denied {
                credential: true,
                ..
            }
        ),
        "{error}"
    );
    assert!(server.seen().len() <= 3, "{:?}", server.seen());
    let text = format!("{error} {error:?}");
    assert!(!text.contains("sesame"), "{text}");
}

#[test]
fn a_token_is_fetched_and_renewed_when_it_expires() {
    // Each token is good for three requests.
    let left = std::sync::Mutex::new(std::collections::BTreeMap::new());
    let server = Server::start(move |request| {
        let mut left = left.lock().unwrap();
        if request.path.starts_with("/token") {
            assert!(
                request.path.contains("scope=repository%3Aapp%3Apull"),
                "{}",
                request.path
            );
            let token = format!("t{}", left.len());
            left.insert(format!("Bearer {token}"), 3);
            return Answer::ok(format!(r#"{{"access_token":"{token}"}}"#));
        }
        let token = request.headers.get("authorization");
        match token.and_then(|token| left.get_mut(token)) {
            Some(uses) if *uses > 0 => *uses -= 1,
            _ => {
                let host = &request.headers["host"];
                let header = format!("Bearer realm=\"http://{host}/token\"");
                return Answer::status(401).with("www-authenticate", header);
            }
        }
        Example::new().answer(request)
    });
    let name = format!("{}/app:1", server.host);
    let at = folder();
    pull_with(&name, &Registries::default(), Some(password()), at.path()).unwrap();
    assert!(server.count("/token") >= 2);
}

#[test]
fn a_token_service_elsewhere_is_not_asked_without_tls() {
    let server = Server::start(|_| {
        let header = "Bearer realm=\"http://token.example/x\"";
        Answer::status(401).with("www-authenticate", header)
    });
    let error = pull(&format!("{}/app:1", server.host), folder().path()).unwrap_err();
    assert!(matches!(error, RegistryError::Challenge { .. }), "{error}");
}

#[test]
fn a_busy_registry_is_asked_again_but_not_for_ever() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        if asked.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return Answer::status(429).with("retry-after", "0");
        }
        Example::new().answer(request)
    });
    pull(&format!("{}/app:1", server.host), folder().path()).unwrap();
    let server = Server::start(|_| Answer::status(503).with("retry-after", "0"));
    let error = pull(&format!("{}/app:1", server.host), folder().path()).unwrap_err();
    assert!(
        matches!(error, RegistryError::Busy { status: 503, .. }),
        "{error}"
    );
    assert_eq!(server.seen().len(), 5);
}

#[test]
fn mirrors_are_asked_first_and_the_registry_when_they_fail() {
    let registry = Server::start(|request| Example::new().answer(request));
    let half = Server::start(|request| {
        // A mirror that lost its blobs.
        if request.path.contains("/blobs/") {
            return Answer::status(404);
        }
        Example::new().answer(request)
    });
    let empty = Server::start(|_| Answer::status(404));
    let text = |mirror: &Server| {
        format!(
            "[[registry]]\nhost = \"{}\"\nmirrors = [\"http://{}/cache\"]\n",
            registry.host, mirror.host
        )
    };
    let name = format!("{}/app:1", registry.host);
    for mirror in [&half, &empty] {
        let at = folder();
        pull_with(&name, &registries(&text(mirror)), None, at.path()).unwrap();
        assert!(mirror.count("/v2/cache/app/manifests/1") > 0);
    }
    assert_eq!(registry.count("/manifests/1"), 1);
    let gone = format!("{}/other:2", registry.host);
    let error = pull_with(&gone, &registries(&text(&empty)), None, folder().path()).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&empty.host) && text.contains(&registry.host),
        "{text}"
    );
}

#[test]
fn two_pulls_at_once_fetch_each_layer_once() {
    let server = Server::start(|request| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        Example::new().answer(request)
    });
    let at = folder();
    let name = format!("{}/app:1", server.host);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| pull(&name, at.path()).unwrap());
        }
    });
    let layer = Digest::of(&Example::new().layers[0]).to_string();
    assert_eq!(server.count(&layer), 1);
}

#[test]
fn a_platform_that_is_not_there_is_named() {
    let server = Server::start(|request| {
        let index = String::from_utf8(Example::new().index).unwrap();
        match request.path.contains("manifests/1") {
            true => Answer::ok(index.replace("amd64", "s390x")),
            false => Example::new().answer(request),
        }
    });
    let error = pull(&format!("{}/app:1", server.host), folder().path()).unwrap_err();
    let RegistryError::Image(OciError::NoPlatform { there, .. }) = &error else {
        panic!("{error}");
    };
    assert!(there.contains(&"linux/s390x".to_owned()), "{there:?}");
}
