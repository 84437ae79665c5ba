//! Places that a user names on the command line.
//!
//! | form | place |
//! |---|---|
//! | `PATH`, `oci:FOLDER[:NAME]`, `oci-archive:FILE[:NAME]` | files of this host |
//! | `oci://HOST/REPOSITORY[:TAG]` | a registry |
//! | `s3://BUCKET/PREFIX[:NAME]` | an object store, with the variables of the environment that its own tools use |
//! | `https://HOST/FOLDER/[:NAME]` | a folder on a web server |
//! | `https://HOST/FILE.forkd` | one file on a web server |

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, bail};
use forkd_hub::HubError;
use forkd_hub::layout::{ArchiveFile, Folder, Place, Shelf};
use forkd_hub::remote::{Bucket, Cache, Keys, Registry, WebFolder, file};
use forkd_machine::dirs::Dirs;
use forkd_oci::auth::{self, Helpers, Secret};
use forkd_oci::manifest::Platform;
use forkd_oci::name::ImageName;
use forkd_oci::registries::Registries;
use forkd_oci::registry::{Pull, RegistryError};

/// A place that a user names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    File(PathBuf, Option<String>),
    Folder(PathBuf, Option<String>),
    Registry(Box<ImageName>, Option<String>),
    Bucket(String, Option<String>),
    Web(String, Option<String>),
    WebFile(String),
}

/// Whether a path is that of a packed snapshot.
pub fn is_archive(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "forkd")
}

impl Target {
    /// Parses the forms of the table above. A path that is no folder is a file if `file` says so.
    pub fn parse(text: &str, file: impl Fn(&Path) -> bool) -> anyhow::Result<Self> {
        let split = |rest: &str| match rest.split_once(':') {
            Some((path, name)) => (PathBuf::from(path), Some(name.to_owned())),
            None => (PathBuf::from(rest), None),
        };
        if let Some((kind, rest)) = text.split_once("://") {
            return Self::remote(text, kind, rest);
        }
        if let Some(rest) = text.strip_prefix("oci-archive:") {
            let (path, name) = split(rest);
            return Ok(Self::File(path, name));
        }
        if let Some(rest) = text.strip_prefix("oci:") {
            let (path, name) = split(rest);
            return Ok(Self::Folder(path, name));
        }
        let path = PathBuf::from(text);
        Ok(match file(&path) {
            true => Self::File(path, None),
            false => Self::Folder(path, None),
        })
    }

    fn remote(text: &str, kind: &str, rest: &str) -> anyhow::Result<Self> {
        // A colon before the last slash belongs to a port.
        let (folder, name) = match rest.rsplit_once(':') {
            Some((folder, name)) if !name.contains('/') && folder.contains('/') => (
                folder,
                Some(name.to_owned()).filter(|name| !name.is_empty()),
            ),
            _ => (rest, None),
        };
        Ok(match kind {
            "oci" | "docker" => {
                let image: ImageName = rest.parse()?;
                let digest = image.digest.map(|digest| digest.to_string());
                let name = digest.or_else(|| image.tag.clone());
                Self::Registry(Box::new(image), name)
            }
            "s3" => Self::Bucket(folder.to_owned(), name),
            "http" | "https" if is_file(text) => Self::WebFile(text.to_owned()),
            "http" | "https" => Self::Web(format!("{kind}://{folder}"), name),
            _ => bail!("{kind}:// is not known: use oci://, s3://, https://, or a path"),
        })
    }

    /// The name that the user gave.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::File(_, name)
            | Self::Folder(_, name)
            | Self::Registry(_, name)
            | Self::Bucket(_, name)
            | Self::Web(_, name) => name.as_deref(),
            Self::WebFile(_) => None,
        }
    }

    /// The name of a snapshot that is pushed without one.
    pub fn default_name<'a>(&self, tag: &'a str) -> &'a str {
        match self {
            Self::Registry(..) => forkd_oci::name::LATEST,
            _ => tag,
        }
    }

    /// The path beside which a draft is written.
    pub fn draft(&self) -> anyhow::Result<PathBuf> {
        match self {
            Self::File(path, _) | Self::Folder(path, _) => Ok(path.clone()),
            _ => {
                let folder = cache_folder()?;
                std::fs::create_dir_all(&folder)
                    .with_context(|| format!("cannot make the folder {}", folder.display()))?;
                Ok(folder.join("draft"))
            }
        }
    }

    /// The place to read from.
    pub fn place(&self) -> Result<Box<dyn Place + Send>, HubError> {
        Ok(match self {
            Self::File(path, _) => Box::new(ArchiveFile::open(path)?),
            Self::Folder(path, _) => Box::new(Folder::open(path)?),
            Self::Registry(image, _) => Box::new(registry(image)?),
            Self::Bucket(folder, _) => Box::new(Bucket::open(folder, keys()?, cache()?)?),
            Self::Web(url, _) => Box::new(WebFolder::open(url, cache()?)?),
            Self::WebFile(url) => {
                let mut whole =
                    tempfile::NamedTempFile::new_in(made_cache()?).map_err(HubError::Stream)?;
                file::fetch(url, whole.as_file_mut())?;
                // The archive keeps the file open; its name is not needed.
                Box::new(ArchiveFile::open(whole.path())?)
            }
        })
    }

    /// The place to write to, if it holds artifacts as blobs.
    pub fn shelf(&self) -> Result<Option<Arc<dyn Shelf + Send + Sync>>, HubError> {
        Ok(Some(match self {
            Self::File(..) | Self::WebFile(_) => return Ok(None),
            Self::Folder(path, _) => Arc::new(Folder::create(path)?),
            Self::Registry(image, _) => Arc::new(registry(image)?),
            Self::Bucket(folder, _) => Arc::new(Bucket::open(folder, keys()?, cache()?)?),
            Self::Web(..) => {
                return Err(HubError::invalid(
                    "a folder on a web server cannot be written: push to the folder that it serves",
                ));
            }
        }))
    }

    /// Writes a packed snapshot to the URL of a file.
    pub fn upload(&self, path: &Path) -> Result<(), HubError> {
        match self {
            Self::WebFile(url) => file::put(url, path).map(drop),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, _) | Self::Folder(path, _) => write!(f, "{}", path.display()),
            Self::Registry(image, _) => write!(f, "oci://{image}"),
            Self::Bucket(folder, _) => write!(f, "s3://{folder}"),
            // The query of a presigned URL is a right to write.
            Self::Web(url, _) | Self::WebFile(url) => {
                f.write_str(url.split('?').next().unwrap_or_default())
            }
        }
    }
}

fn is_file(url: &str) -> bool {
    let path = url.split('?').next().unwrap_or_default();
    url.contains('?') || is_archive(Path::new(path))
}

fn cache_folder() -> anyhow::Result<PathBuf> {
    let dirs =
        Dirs::of_user().context("there is no folder for transfers: set HOME or XDG_CACHE_HOME")?;
    Ok(dirs.cache.join("hub"))
}

fn made_cache() -> Result<PathBuf, HubError> {
    let folder = cache_folder().map_err(|error| HubError::invalid(error.to_string()))?;
    std::fs::create_dir_all(&folder).map_err(HubError::Stream)?;
    Ok(folder)
}

fn cache() -> Result<Cache, HubError> {
    Cache::at(&made_cache()?, Arc::new(AtomicBool::new(false)))
}

/// A repository, with the registries of the host and the credentials of the user.
fn registry(image: &ImageName) -> Result<Registry, HubError> {
    let registries = Registries::read(None).map_err(RegistryError::from)?;
    let access = Pull {
        name: image,
        platform: &Platform::host(),
        registries: &registries,
        credential: None,
        auth_files: auth::files_of_user(),
        helpers: Helpers::Run,
    };
    Registry::open(&access, cache()?)
}

/// The rights of the user, from the variables that the tools of object stores use.
fn keys() -> Result<Keys, HubError> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let needed = |name: &str| {
        set(name).ok_or_else(|| HubError::invalid(format!("the variable {name} is not set")))
    };
    let region = set("AWS_REGION").or_else(|| set("AWS_DEFAULT_REGION"));
    Ok(Keys {
        endpoint: set("AWS_ENDPOINT_URL_S3").map_or_else(|| needed("AWS_ENDPOINT_URL"), Ok)?,
        region: region.unwrap_or_else(|| "us-east-1".into()),
        id: needed("AWS_ACCESS_KEY_ID")?,
        secret: Secret::new(needed("AWS_SECRET_ACCESS_KEY")?),
        token: set("AWS_SESSION_TOKEN").map(Secret::new),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_told_apart() {
        let parse = |text: &str| Target::parse(text, |path| path.extension().is_some());
        let some = |name: &str| Some(name.to_owned());
        let folder =
            |path: &str, name: Option<&str>| Target::Folder(path.into(), name.map(str::to_owned));
        assert_eq!(parse("/srv/hub").unwrap(), folder("/srv/hub", None));
        assert_eq!(parse("oci:/x:py").unwrap(), folder("/x", Some("py")));
        assert_eq!(
            parse("oci-archive:a.forkd").unwrap(),
            Target::File("a.forkd".into(), None)
        );
        assert_eq!(
            parse("a.forkd").unwrap(),
            Target::File("a.forkd".into(), None)
        );
        assert_eq!(
            parse("s3://bucket/x/y:py").unwrap(),
            Target::Bucket("bucket/x/y".into(), some("py"))
        );
        let web = |url: &str, name| Target::Web(url.into(), name);
        assert_eq!(
            parse("http://h:80/x/:py").unwrap(),
            web("http://h:80/x/", some("py"))
        );
        assert_eq!(parse("http://h:80/x").unwrap(), web("http://h:80/x", None));
        let presigned = "https://h/x.forkd?signature=s";
        let parsed = parse(presigned).unwrap();
        assert_eq!(parsed, Target::WebFile(presigned.into()));
        assert_eq!(parsed.to_string(), "https://h/x.forkd");
        let registry = parse("oci://127.0.0.1:5000/team/py:2").unwrap();
        assert_eq!(registry.name(), Some("2"));
        assert_eq!(registry.to_string(), "oci://127.0.0.1:5000/team/py:2");
        assert!(parse("ftp://h/x").is_err());
    }
}
