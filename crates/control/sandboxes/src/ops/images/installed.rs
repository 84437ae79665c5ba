//! Images in the data directory: what is known of them, who sees them, and how they come and go.
//!
//! ```text
//! images/NAME/        root.ext4, image.json, and origin.json if the daemon fetched it
//! images/.new-ID/     being installed
//! images/.gone-ID/    being removed
//! ```
//!
//! A folder gets its name by one rename, so an image is there as a whole or not at all.

use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forkd_api::{ErrorCode, ImageCheck, ImageDetail, ImageInfo};
use forkd_formats::image::{DISK, ImageRecord, ImageSource, MAX_BYTES, RECORD};
use forkd_formats::image_cli::ImageFetched;
use forkd_formats::image_origin::{self, ORIGIN, Origin};
use forkd_store::{Entry, Image, Store};
use forkd_types::{Tag, chain};

use crate::error::Error;

const NEW: &str = ".new-";
const GONE: &str = ".gone-";
/// In front of the key of a build, where images of registries have the name that was asked for.
pub const BUILT: &str = "build:";

/// An image with its records.
#[derive(Debug)]
pub struct Installed {
    pub image: Image,
    pub record: Option<ImageRecord>,
    pub origin: Option<Origin>,
}

/// Whether something of this owner is the asker's; none asks about what belongs to the administrators.
pub type Owns<'a> = &'a dyn Fn(Option<&str>) -> bool;

impl Installed {
    /// An image by name, if the asker may see it.
    pub fn get(store: &Store, name: &Tag, owns: Owns<'_>) -> Result<Self, Error> {
        let image = store
            .image(name)
            .map_err(Error::store(format!("image {name} cannot be used")))?;
        let found = Self::read(image)?;
        if !found.is_visible(owns) {
            return Err(no_image(name));
        }
        Ok(found)
    }

    /// Every image that the asker may see.
    pub fn list(store: &Store, owns: Owns<'_>) -> Result<Vec<Self>, Error> {
        let images = store
            .images()
            .map_err(Error::store("the images cannot be listed"))?;
        let all = images
            .into_iter()
            .map(Self::read)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(all.into_iter().filter(|one| one.is_visible(owns)).collect())
    }

    fn read(image: Image) -> Result<Self, Error> {
        // A folder that was filled by hand may have no record, or one of another version: the disk is shown all the same.
        let record = read_small(&image.dir.join(RECORD), MAX_BYTES)?;
        let record = record.and_then(|bytes| ImageRecord::parse(&bytes).ok());
        let path = image.dir.join(ORIGIN);
        let origin = match read_small(&path, image_origin::MAX_BYTES)? {
            // An origin that cannot be read could hide an owner.
            Some(bytes) => Some(Origin::parse(&bytes).map_err(|error| {
                Error::refused(
                    ErrorCode::Internal,
                    format!("{}: {}", path.display(), chain(&error)),
                )
            })?),
            None => None,
        };
        Ok(Self {
            image,
            record,
            origin,
        })
    }

    fn is_visible(&self, owns: Owns<'_>) -> bool {
        match &self.origin {
            None => true,
            Some(origin) => origin.public || self.is_owned(owns),
        }
    }

    /// Whether the asker may remove it.
    pub fn is_owned(&self, owns: Owns<'_>) -> bool {
        match &self.origin {
            None => owns(None),
            Some(origin) => origin.owners.iter().any(|owner| owns(Some(owner))) || owns(None),
        }
    }

    fn digest(&self) -> Option<&str> {
        match &self.record.as_ref()?.source {
            ImageSource::Oci { digest, .. } => Some(digest),
            ImageSource::Debian { .. } => None,
        }
    }

    pub fn info(&self) -> ImageInfo {
        let source = self.record.as_ref().map(|record| match &record.source {
            ImageSource::Oci { image, .. } => image.clone(),
            ImageSource::Debian { suite, .. } => format!("Debian {suite}"),
        });
        ImageInfo {
            name: self.image.name.to_string(),
            dir: self.image.dir.display().to_string(),
            logical_bytes: self.image.sizes.logical,
            physical_bytes: self.image.sizes.physical,
            source,
            digest: self.digest().map(str::to_owned),
            created_at_unix: self.origin.as_ref().map(|origin| origin.created_at_unix),
            public: self.origin.as_ref().is_none_or(|origin| origin.public),
        }
    }

    /// Everything about it. The snapshots are those of every owner.
    pub fn detail(&self, store: &Store) -> ImageDetail {
        let record = self.record.as_ref();
        let run = record.map(|record| record.run.clone()).unwrap_or_default();
        ImageDetail {
            info: self.info(),
            description: record.map_or_else(String::new, |record| record.description.clone()),
            memory_mib: record.map_or(0, |record| record.memory_mib.0),
            vcpus: record.map_or(1, |record| record.vcpus),
            env: record.map(|record| record.env.clone()).unwrap_or_default(),
            user: run.user,
            working_dir: run.working_dir,
            entrypoint: run.entrypoint,
            cmd: run.cmd,
            ports: run.ports,
            healthcheck: run.healthcheck,
            stop_signal: run.stop_signal,
            packages: record.map_or(0, |record| record.packages.len()),
            services: record
                .map(|record| {
                    record
                        .prepare
                        .services
                        .iter()
                        .map(|one| one.name.clone())
                        .collect()
                })
                .unwrap_or_default(),
            check: record
                .and_then(|record| record.prepare.check.clone())
                .map(|check| ImageCheck {
                    exec: check.exec,
                    user: check.user,
                    stdout: check.stdout,
                    timeout_secs: check.timeout_secs,
                }),
            snapshots: self.snapshots(store),
        }
    }

    /// Tags of the snapshots that were booted from it.
    pub fn snapshots(&self, store: &Store) -> Vec<String> {
        let entries = store.list();
        let of_image = entries.iter().filter_map(|entry| match entry {
            Entry::Whole(manifest) if manifest.source.image == self.image.name.as_str() => {
                Some(manifest.tag.to_string())
            }
            _ => None,
        });
        of_image.collect()
    }

    /// Removes it. Snapshots keep their own copy of the disk.
    pub fn remove(self) -> Result<(), Error> {
        let folder = self.image.dir.parent().unwrap_or(Path::new("."));
        let gone = folder.join(format!("{GONE}{}", random()));
        std::fs::rename(&self.image.dir, &gone).map_err(Error::io("remove", &self.image.dir))?;
        std::fs::remove_dir_all(&gone).map_err(Error::io("remove", &gone))
    }
}

pub fn no_image(name: &Tag) -> Error {
    Error::hinted(
        ErrorCode::ImageNotFound,
        format!("there is no image {name}"),
        "GET /v1/images (forkd image ls) lists what is installed",
    )
}

fn random() -> String {
    hex::encode(rand::random::<[u8; 8]>())
}

fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Error> {
    let mut bytes = Vec::new();
    match std::fs::File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", path)(error)),
    }
}

/// Installs what `forkd-image` left in a folder. Its process read strangers' bytes: nothing it left is believed before a
/// look, and the look comes after the files are out of its reach.
pub fn install(
    store: &Store,
    from: &Path,
    fetched: &ImageFetched,
    origin: Origin,
) -> Result<Installed, Error> {
    let name: Tag = fetched.name.parse().map_err(|error| {
        Error::refused(
            ErrorCode::ImageInvalid,
            format!("the image got a malformed name: {error}"),
        )
    })?;
    let images = store.layout().images();
    let fresh = Fresh::make(&images)?;
    for file in [DISK, RECORD] {
        let to = fresh.path.join(file);
        std::fs::rename(from.join(file), &to).map_err(Error::io("move", &to))?;
        check_file(&to)?;
    }
    let record = check_record(&fresh.path, fetched)?;
    let path = images.join(name.as_str());
    if path.join(RECORD).exists() && !replaces(store, &name, &origin)? {
        return known(store, &name, &record, origin);
    }
    write_origin(&fresh.path, &origin)?;
    sync(&fresh.path)?;
    let old = images.join(format!("{GONE}{}", random()));
    if path.exists() {
        std::fs::rename(&path, &old).map_err(Error::io("replace", &path))?;
    }
    std::fs::rename(&fresh.path, &path).map_err(Error::io("install", &path))?;
    match std::fs::remove_dir_all(&old) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            // The next start of the daemon removes it.
            tracing::warn!(%error, folder = %old.display(), "a replaced image was not removed");
        }
        _ => {}
    }
    sync(&images)?;
    Installed::get(store, &name, &|_| true)
}

/// Whether a built image may take the place of the one that is there: an earlier build of the same owner.
fn replaces(store: &Store, name: &Tag, origin: &Origin) -> Result<bool, Error> {
    let built = |origin: &Origin| origin.asked.iter().any(|asked| asked.starts_with(BUILT));
    if !built(origin) {
        return Ok(false);
    }
    let found = Installed::get(store, name, &|_| true)?;
    Ok(found
        .origin
        .is_some_and(|old| built(&old) && old.owners == origin.owners))
}

/// A folder that is removed unless it gets its name.
struct Fresh {
    path: PathBuf,
}

impl Fresh {
    fn make(images: &Path) -> Result<Self, Error> {
        let path = images.join(format!("{NEW}{}", random()));
        std::fs::create_dir(&path).map_err(Error::io("make", &path))?;
        Ok(Self { path })
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // It is gone if it got its name.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Refuses a link to another file of the host.
fn check_file(path: &Path) -> Result<(), Error> {
    let meta = std::fs::symlink_metadata(path).map_err(Error::io("read", path))?;
    if !meta.is_file() || meta.nlink() != 1 {
        return Err(Error::refused(
            ErrorCode::ImageInvalid,
            "the image was not made of plain files",
        ));
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o444))
        .map_err(Error::io("protect", path))
}

fn check_record(folder: &Path, fetched: &ImageFetched) -> Result<ImageRecord, Error> {
    let wrong = |problem: String| Error::refused(ErrorCode::ImageInvalid, problem);
    let bytes = read_small(&folder.join(RECORD), MAX_BYTES)?.unwrap_or_default();
    let record = ImageRecord::parse(&bytes).map_err(|error| wrong(chain(&error)))?;
    let disk = folder.join(DISK);
    let size = std::fs::metadata(&disk)
        .map_err(Error::io("read", &disk))?
        .len();
    if record.name != fetched.name || record.disk.size != size {
        return Err(wrong(
            "the record of the image does not fit its disk".into(),
        ));
    }
    Ok(record)
}

/// The same image was fetched before, perhaps by another owner.
fn known(
    store: &Store,
    name: &Tag,
    record: &ImageRecord,
    origin: Origin,
) -> Result<Installed, Error> {
    let mut found = Installed::get(store, name, &|_| true)?;
    let same = found
        .record
        .as_ref()
        .is_some_and(|known| known.disk == record.disk);
    if !same {
        return Err(Error::hinted(
            ErrorCode::AlreadyExists,
            format!("there is another image {name}"),
            "choose another name, or remove that one first (forkd image rm)",
        ));
    }
    if let Some(known) = &mut found.origin {
        known.merge(origin);
        write_origin(&found.image.dir, known)?;
    }
    Ok(found)
}

fn write_origin(folder: &Path, origin: &Origin) -> Result<(), Error> {
    let (path, new) = (folder.join(ORIGIN), folder.join(format!("{ORIGIN}.new")));
    std::fs::write(&new, origin.to_json()).map_err(Error::io("write", &new))?;
    sync(&new)?;
    std::fs::rename(&new, &path).map_err(Error::io("write", &path))
}

fn sync(path: &Path) -> Result<(), Error> {
    std::fs::File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(Error::io("write out", path))
}

/// Removes what an earlier daemon left half done.
pub fn sweep(images: &Path, staging: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(staging) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    for entry in std::fs::read_dir(images)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(NEW) || name.starts_with(GONE) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
