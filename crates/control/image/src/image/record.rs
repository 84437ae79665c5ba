//! Filling in `image.json`.

pub use forkd_formats::image::ImageRecord;

use crate::digest::FileDigest;
use crate::recipe::Recipe;
use crate::root::Root;

/// The record of a root that is about to become the image of a recipe. The UUID follows with the disk.
pub(super) fn new(recipe: &Recipe, root: Root, disk: FileDigest) -> ImageRecord {
    let mut record = ImageRecord::empty(recipe.name.to_string(), root.source, disk);
    record.description = recipe.description.clone();
    record.recipe = crate::digest::of_bytes(&recipe.fingerprint());
    record.memory_mib = recipe.memory;
    record.vcpus = recipe.vcpus;
    record.env = root.env;
    record.env.extend(recipe.env.clone());
    record.prepare = recipe.prepare.clone();
    record.kernel = root.kernel;
    record.packages = root.packages;
    record.run = root.run;
    record
}
