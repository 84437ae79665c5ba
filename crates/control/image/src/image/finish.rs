//! Completes the tree of an image after its packages are installed.
//!
//! Adds the recipe's files, the environment and a host name; removes caches, logs and identities that an
//! installation leaves behind.

use std::collections::BTreeMap;

use crate::recipe::{AddedUser, Base, Recipe};
use crate::root::tree::{Content, Meta, Node, Tree, TreeError};
use crate::root::{Root, RunDefaults};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Valid until the agent gives the guest its own name.
const HOSTNAME: &str = "forkd";

/// Folders that are mounted over in a guest.
const MOUNTED: [&str; 5] = ["dev", "proc", "run", "sys", "tmp"];

/// Folders that are needed only during an installation of Debian's packages.
const EMPTIED: [&str; 4] = [
    "var/cache/apt",
    "var/cache/ldconfig",
    "var/lib/apt/lists",
    "var/log",
];

/// Files that the installation leaves behind.
const REMOVED: [&str; 5] = [
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
    "var/cache/debconf/config.dat-old",
    "var/cache/debconf/templates.dat-old",
    "var/lib/dpkg/status-old",
];

/// Completes the tree of an image.
pub fn finish(root: &mut Root, recipe: &Recipe) -> Result<(), TreeError> {
    let (tree, env) = (&mut root.tree, &root.env);
    // A container image is left as it is, apart from what a guest needs.
    if matches!(recipe.base, Base::Debian { .. }) {
        for path in REMOVED {
            tree.remove(path);
        }
        for path in EMPTIED {
            empty(tree, path)?;
        }
    }
    for path in MOUNTED {
        empty(tree, path)?;
    }
    // An empty machine-id is filled in at each start; a missing one is an error to some programs.
    put(tree, "etc/machine-id", "")?;
    put(tree, "etc/hostname", &format!("{HOSTNAME}\n"))?;
    let hosts = format!(
        "127.0.0.1\tlocalhost\n127.0.1.1\t{HOSTNAME}\n\
         ::1\tlocalhost ip6-localhost ip6-loopback\n"
    );
    put(tree, "etc/hosts", &hosts)?;
    put(
        tree,
        "etc/resolv.conf",
        "# filled in by forkd-agent when the guest has a network\n",
    )?;
    let environment = environment(recipe, env);
    put(tree, "etc/environment", &environment)?;
    put(tree, "etc/forkd/env", &environment)?;
    if let Some(user) = &recipe.user {
        add_user(tree, user)?;
        root.run.user = Some(user.name.clone());
    }
    let defaults = defaults(&root.run);
    if !defaults.is_empty() {
        put(tree, "etc/forkd/defaults", &defaults)?;
    }
    for file in &recipe.files {
        let content = Content::Inline(file.content.as_slice().into());
        tree.put_file(&file.path, Meta::root(file.mode), content)?;
    }
    Ok(())
}

/// Makes a folder, and removes what is in it. A link in its place, such as `tmp` to `var/tmp`, is replaced.
fn empty(tree: &mut Tree, path: &str) -> Result<(), TreeError> {
    tree.clear(path);
    if !matches!(tree.get(path), Some(Node::Directory(_))) {
        let mode = if path == "tmp" { 0o1777 } else { 0o755 };
        tree.put(path, Node::Directory(Meta::root(mode)))?;
    }
    Ok(())
}

/// Writes a file over the existing one, or over a link.
fn put(tree: &mut Tree, path: &str, text: &str) -> Result<(), TreeError> {
    let path = tree.through_links(path)?;
    tree.put_text(&path, 0o644, text)
}

/// Adds a user with a group of the same name and number, without a password. An existing user of that name stays.
fn add_user(tree: &mut Tree, user: &AddedUser) -> Result<(), TreeError> {
    let AddedUser { name, uid } = user;
    let home = format!("home/{name}");
    for (path, mode, line) in [
        (
            "etc/passwd",
            0o644,
            format!("{name}:x:{uid}:{uid}::/{home}:/bin/sh\n"),
        ),
        ("etc/group", 0o644, format!("{name}:x:{uid}:\n")),
        ("etc/shadow", 0o640, format!("{name}:*:1:0:99999:7:::\n")),
    ] {
        let path = tree.through_links(path)?;
        let old = tree.read(&path).unwrap_or_default();
        let old = String::from_utf8_lossy(&old);
        if !old.lines().any(|line| line.split(':').next() == Some(name)) {
            tree.put_text(&path, mode, &format!("{old}{line}"))?;
        }
    }
    let meta = Meta {
        uid: *uid,
        gid: *uid,
        ..Meta::root(0o755)
    };
    tree.put(&home, Node::Directory(meta))
}

/// Who and where the agent runs a program when a request does not say.
fn defaults(run: &RunDefaults) -> String {
    let line = |key: &str, value: &Option<String>| {
        value
            .as_ref()
            .map_or_else(String::new, |value| format!("{key}={value}\n"))
    };
    line("user", &run.user) + &line("cwd", &run.working_dir)
}

/// `KEY=VALUE` lines. What the source brings comes first: the recipe may override `PATH`, too.
fn environment(recipe: &Recipe, of_source: &BTreeMap<String, String>) -> String {
    let mut env = of_source.clone();
    env.extend(recipe.env.clone());
    env.entry("PATH".into()).or_insert_with(|| PATH.into());
    env.into_iter()
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Folder;
    use crate::root::ImageSource;

    fn root(tree: Tree) -> Root {
        Root {
            tree,
            packages: Vec::new(),
            source: ImageSource::Oci {
                image: "oci:x".into(),
                digest: String::new(),
            },
            kernel: None,
            env: BTreeMap::new(),
            run: RunDefaults::default(),
        }
    }

    #[test]
    fn an_image_is_complete_and_clean() {
        let mut tree = Tree::default();
        for path in [
            "var/lib/apt/lists/big",
            "var/log/dpkg.log",
            "dev/null",
            "etc/apt/apt.conf.d/99mmdebstrap",
            "usr/bin/bash",
        ] {
            tree.put_text(path, 0o644, "x").unwrap();
        }
        tree.put(
            "etc/resolv.conf",
            Node::Symlink(Meta::root(0o777), "/run/x".into()),
        )
        .unwrap();
        let recipe = Recipe::built_in("python-numpy").unwrap();
        let mut root = root(tree);
        finish(&mut root, &recipe).unwrap();
        let tree = root.tree;
        assert_eq!(tree.read("etc/machine-id").unwrap(), b"");
        assert!(tree.read("etc/resolv.conf").is_ok());
        let env = String::from_utf8(tree.read("etc/forkd/env").unwrap()).unwrap();
        assert!(env.contains("PATH=/usr/local/sbin:") && env.contains("LANG=C.UTF-8\n"));
        for gone in ["var/lib/apt/lists/big", "var/log/dpkg.log", "dev/null"] {
            assert!(tree.get(gone).is_none(), "{gone}");
        }
        for kept in ["usr/bin/bash", "var/log", "dev", "proc", "tmp"] {
            assert!(tree.get(kept).is_some(), "{kept}");
        }
        assert!(tree.get("etc/apt/apt.conf.d/99mmdebstrap").is_none());
    }

    #[test]
    fn a_container_image_keeps_its_logs_and_gets_its_environment() {
        let mut tree = Tree::default();
        tree.put_text("var/log/x", 0o644, "x").unwrap();
        tree.put("etc", Node::Symlink(Meta::root(0o777), "usr/etc".into()))
            .unwrap();
        tree.put("tmp", Node::Symlink(Meta::root(0o777), "/gone".into()))
            .unwrap();
        let recipe = Recipe::of_image("x".parse().unwrap(), "oci:x", forkd_types::MiB(64));
        let mut root = root(tree);
        root.env = BTreeMap::from([("PATH".into(), "/app".into())]);
        root.run.user = Some("app".into());
        root.run.working_dir = Some("/srv".into());
        finish(&mut root, &recipe).unwrap();
        let tree = root.tree;
        let defaults = tree.read("usr/etc/forkd/defaults").unwrap();
        assert_eq!(defaults, b"user=app\ncwd=/srv\n");
        assert!(tree.get("var/log/x").is_some());
        assert!(matches!(tree.get("tmp"), Some(Node::Directory(_))));
        assert_eq!(tree.read("usr/etc/forkd/env").unwrap(), b"PATH=/app\n");
    }

    #[test]
    fn the_recipes_files_have_the_last_word() {
        let text = "schema = 1\nname = \"x\"\ndisk_mib = 256\nmemory_mib = 128\nvcpus = 1\n\
            [base]\ndebian = \"trixie\"\n[env]\nPATH = \"/bin\"\n\
            [[files]]\npath = \"/etc/hostname\"\ncontent = \"mine\"\nmode = 0o600\n";
        let recipe = Recipe::parse(text, std::path::Path::new("r"), &Folder::BuiltIn(&[])).unwrap();
        let tree = Tree::default();
        let mut root = root(tree);
        finish(&mut root, &recipe).unwrap();
        let tree = root.tree;
        assert_eq!(tree.read("etc/hostname").unwrap(), b"mine");
        assert_eq!(tree.read("etc/environment").unwrap(), b"PATH=/bin\n");
    }
}
