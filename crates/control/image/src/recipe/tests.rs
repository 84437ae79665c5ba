use std::error::Error as _;

use forkd_formats::prepare::{Ready, Restart};

use super::*;

const SMALL: &str = "schema = 1\nname = \"small\"\ndisk_mib = 256\nmemory_mib = 128\nvcpus = 1\n\
    packages = [\"git\", \"bash\", \"git\"]\n[base]\ndebian = \"trixie\"\n";

const SECOND: &str = "schema = 2\nname = \"second\"\n[base]\ndebian = \"trixie\"\npackages = [\"git\"]\n\
    [machine]\ndisk_mib = 256\n";

const FILES: &[(&str, &[u8])] = &[("here", b"content"), ("lock", b"ruff>=1\n")];

fn parse(text: &str) -> Result<Recipe, RecipeError> {
    Recipe::parse(
        text,
        Path::new("small/recipe.toml"),
        &Folder::BuiltIn(FILES),
    )
}

fn message(text: &str) -> String {
    let error = parse(text).unwrap_err();
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[test]
fn the_built_in_recipes_parse() {
    for name in Recipe::built_in_names() {
        let recipe = Recipe::built_in(name).unwrap();
        assert_eq!(recipe.name.as_str(), name);
        // The machine is no image of guests.
        assert_eq!(recipe.prepare.check.is_some(), name != "machine", "{name}");
        assert!(!recipe.description.is_empty(), "{name}");
    }
    let old = Recipe::built_in("e2b-codeinterpreter").unwrap();
    assert_eq!(old.name.as_str(), "code-interpreter");
}

#[test]
fn a_recipe_adds_to_the_one_below() {
    let recipe = Recipe::built_in("code-interpreter").unwrap();
    for package in ["python3-numpy", "python3-pandas"] {
        assert!(
            recipe.packages.iter().any(|name| name == package),
            "{package}"
        );
    }
    assert_eq!((recipe.vcpus, recipe.memory), (1, MiB(1024)));
    assert_eq!(recipe.env["PYTHONUNBUFFERED"], "1");
    let [
        WarmupStep::Interpreter(warmup),
        WarmupStep::Interpreter(_node),
    ] = recipe.prepare.warmup.as_slice()
    else {
        panic!("{:?}", recipe.prepare.warmup);
    };
    assert_eq!(warmup.imports.first().unwrap(), "numpy");
    assert!(warmup.imports.iter().any(|name| name == "pandas as pd"));
    assert!(warmup.code.contains("np.ones") && warmup.code.contains("savefig"));
}

#[test]
fn a_small_recipe_of_schema_1_has_defaults() {
    let recipe = parse(SMALL).unwrap();
    assert_eq!(recipe.packages, ["bash", "git"]);
    let (suite, variant) = ("trixie".to_owned(), Variant::Minbase);
    assert_eq!(recipe.base, Base::Debian { suite, variant });
    assert!(recipe.prepare.is_empty());
    let warm = parse(&format!("{SMALL}[warmup]\ninterpreter = \"node\"\n")).unwrap();
    assert_eq!(warm.prepare.warmup.len(), 1);
}

#[test]
fn schema_2_describes_services_steps_and_hooks() {
    let recipe = parse(&format!(
        "{SECOND}[user]\nname = \"app\"\n[[run]]\nexec = [\"true\"]\n\
         [[service]]\nname = \"db\"\nexec = [\"db\"]\nrestart = \"never\"\n\
         ready = [{{ port = 1 }}, {{ file = \"/run/x\" }}, {{ exec = [\"ok\"] }}, {{ log = \"up\" }}]\n\
         [[warmup]]\nexec = [\"warm\"]\n[settle]\nfor_ms = 100\n\
         [[on_fork]]\nname = \"hook\"\nscript = \"#!/bin/sh\\n\"\n\
         [check]\nexec = [\"check\"]\n[[files]]\npath = \"/a\"\nsource = \"here\"\n"
    ))
    .unwrap();
    let service = &recipe.prepare.services[0];
    assert_eq!((service.restart, service.ready.len()), (Restart::Never, 4));
    assert_eq!(service.ready[2], Ready::Exec(vec!["ok".into()]));
    assert_eq!(recipe.prepare.settle.unwrap().for_ms, 100);
    let paths: Vec<_> = recipe.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["a", "etc/forkd/on-fork.d/0001-hook"]);
    assert_eq!(recipe.files[0].content, b"content");
    assert_eq!(recipe.user.unwrap().uid, 1000);
}

#[test]
fn a_misspelt_field_is_named_with_its_line() {
    let text = message(&SMALL.replace("vcpus = 1", "vcpu = 1"));
    assert!(text.contains("small/recipe.toml is not a recipe"), "{text}");
    assert!(text.contains("line 5") && text.contains("vcpu"), "{text}");
    let text = message(&format!(
        "{SECOND}[[service]]\nname = \"x\"\nexec = [\"x\"]\nredy = []\n"
    ));
    assert!(text.contains("line 11") && text.contains("redy"), "{text}");
}

#[test]
fn other_schemas_are_refused_before_anything_else_is_read() {
    let text = message("schema = 9\nsomething = \"new\"\n");
    assert_eq!(
        text,
        "small/recipe.toml has schema 9; this version reads schemas 1 and 2"
    );
    let long = format!("schema = 2\n# {}", "x".repeat(MAX_TEXT));
    assert!(message(&long).contains("is longer than"));
}

#[test]
fn values_that_make_no_sense_are_named_with_line_and_field() {
    for (from, to, expected) in [
        (
            "256",
            "7",
            "recipe.toml:3: disk_mib is 7, and has to be 64 to 4194304",
        ),
        ("vcpus = 1", "vcpus = 40", "recipe.toml:5: vcpus is 40"),
        (
            "\"bash\"",
            "\"git; rm\"",
            "recipe.toml:6: packages[1] is \"git; rm\"",
        ),
        ("trixie", "woody", "recipe.toml:8: base.debian is \"woody\""),
        ("\"small\"", "\"a/b\"", "recipe.toml:2: name is not a name"),
    ] {
        let text = message(&SMALL.replacen(from, to, 1));
        assert!(text.contains(expected), "{text}");
    }
    for (table, expected) in [
        (
            "[env]\n\"A B\" = \"x\"",
            ":8: env has \"A B\", which is not a variable's name",
        ),
        ("[env]\nA = \"x\\ny\"", ":9: env.A has more than one line"),
        ("[[run]]\nexec = []", ":9: run[0].exec is empty"),
        (
            "[[run]]\nexec = [\"x\"]\ntimeout_secs = 0",
            ":10: run[0].timeout_secs is 0",
        ),
        (
            "[[service]]\nname = \"A\"\nexec = [\"x\"]",
            ":9: service[0].name is not a name",
        ),
        (
            "[[service]]\nname = \"a\"\nexec = [\"x\"]\nready = [\n{ port = 1 },\n{ port = 0 }]",
            ":13: service[0].ready[1] has port 0",
        ),
        (
            "[[service]]\nname = \"a\"\nexec = [\"x\"]\n[[service]]\nname = \"a\"\nexec = [\"x\"]",
            ":12: service[1].name is the name of another service",
        ),
        (
            "[[warmup]]\nimports = [\"x\"]",
            ":8: warmup[0] needs either interpreter or exec",
        ),
        (
            "[[on_fork]]\nname = \"a\"\nscript = \"x\"",
            ":10: on_fork[0].script does not begin with #!",
        ),
        (
            "[user]\nname = \"A\"",
            ":9: user.name is not the name of a user",
        ),
        ("[settle]\nbusy_percent = 0", ":9: settle.busy_percent is 0"),
        (
            "[python]\nlock = \"lock\"",
            ":9: python.lock has \"ruff>=1\", which is not NAME==VERSION",
        ),
        (
            "[node]\nlock = \"here\"",
            ":9: node.lock is not a package-lock.json",
        ),
    ] {
        let text = message(&format!("{SECOND}{table}\n"));
        assert!(text.contains(expected), "{table}: {text}");
    }
}

#[test]
fn a_base_is_one_thing_and_pinned() {
    let with = |base: &str| {
        parse(&format!(
            "schema = 2\nname = \"a\"\n[base]\n{base}\n[machine]\ndisk_mib = 256\n"
        ))
    };
    let pinned = "registry.example/a@sha256:00";
    let recipe = with(&format!("oci = \"{pinned}\"")).unwrap();
    assert_eq!(recipe.base, Base::Oci { oci: pinned.into() });
    for (base, expected) in [
        ("", ":3: base needs exactly one of"),
        (
            "debian = \"trixie\"\noci = \"x\"",
            ":3: base needs exactly one of",
        ),
        (
            "oci = \"registry.example/a:1\"",
            ":4: base.oci needs a digest",
        ),
        (
            "recipe = \"../x\"",
            ":4: base.recipe is not the name of a recipe",
        ),
        (
            "oci = \"tar:x\"\npackages = [\"git\"]",
            ":5: base.packages needs base.debian",
        ),
        (
            "recipe = \"nodejs\"\nvariant = \"apt\"",
            ":5: base.variant is a variant of",
        ),
    ] {
        let text = with(base).unwrap_err().to_string();
        assert!(text.contains(expected), "{base}: {text}");
    }
    assert!(matches!(
        with("recipe = \"gone\""),
        Err(RecipeError::Unknown { .. })
    ));
}

#[test]
fn a_recipe_that_starts_from_itself_ends() {
    let folder = tempfile::tempdir().unwrap();
    let text = "schema = 2\nname = \"a\"\n[base]\nrecipe = \"a\"\n";
    std::fs::create_dir(folder.path().join("a")).unwrap();
    std::os::unix::fs::symlink(".", folder.path().join("a/a")).unwrap();
    std::fs::write(folder.path().join("a").join(FILE), text).unwrap();
    let found = Recipe::find(folder.path().join("a").to_str().unwrap());
    assert!(
        matches!(found, Err(RecipeError::TooDeep { .. })),
        "{found:?}"
    );
}

#[test]
fn files_stay_inside() {
    let with = |table: &str| message(&format!("{SMALL}[[files]]\n{table}\n"));
    for path in ["etc/x", "/", "/../etc/x", "/a//b", "/a/./b"] {
        let text = with(&format!("path = \"{path}\"\ncontent = \"\""));
        assert!(text.contains("is not an absolute path"), "{path}: {text}");
    }
    assert!(with("path = \"/a\"").contains("needs either content or source"));
    assert!(with("path = \"/a\"\nsource = \"../x\"").contains("not a file in the folder"));
    assert!(with("path = \"/a\"\nsource = \"gone\"").contains("small/gone"));
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.path().join("link")).unwrap();
    let text = format!("{SMALL}[[files]]\npath = \"/a\"\nsource = \"link\"\n");
    let read = Recipe::parse(&text, Path::new("x"), &Folder::Host(folder.path()));
    assert!(matches!(read, Err(RecipeError::Read { .. })), "{read:?}");
}

#[test]
fn an_added_file_changes_the_fingerprint() {
    let with = |content: &str| {
        let text = format!("{SMALL}[[files]]\npath = \"/a\"\ncontent = \"{content}\"\n");
        parse(&text).unwrap().fingerprint()
    };
    assert_ne!(with("one"), with("two"));
    assert_eq!(with("one"), with("one"));
}

#[test]
fn an_unknown_name_is_said() {
    assert!(matches!(
        Recipe::find("no-such-recipe"),
        Err(RecipeError::Unknown { .. })
    ));
}
