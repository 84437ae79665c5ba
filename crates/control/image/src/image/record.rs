//! Filling in `image.json`.

pub use forkd_formats::image::{ImageRecord, SCHEMA};

use crate::digest::FileDigest;
use crate::recipe::Recipe;
use crate::root::Root;

/// The record of a root that is about to become the image of a recipe. The UUID follows with the disk.
pub(super) fn new(recipe: &Recipe, root: Root, disk: FileDigest) -> ImageRecord {
    let mut env = root.env;
    env.extend(recipe.env.clone());
    ImageRecord {
        schema: SCHEMA,
        name: recipe.name.to_string(),
        description: recipe.description.clone(),
        recipe: crate::digest::of_bytes(&recipe.fingerprint()),
        source: root.source,
        disk,
        uuid: String::new(),
        memory_mib: recipe.memory,
        vcpus: recipe.vcpus,
        env,
        warmup: recipe.warmup.clone(),
        kernel: root.kernel,
        packages: root.packages,
        run: root.run,
    }
}
