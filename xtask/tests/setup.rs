//! Tests the functions of `scripts/setup.sh` and `scripts/apt.sh` against simulated systems.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const DEBIAN_12: &str = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\nID=debian\n";
const DEBIAN_13: &str = "PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\nVERSION_ID=\"13\"\nVERSION_CODENAME=trixie\nID=debian\n";
const UBUNTU: &str = "PRETTY_NAME=\"Ubuntu 24.04.1 LTS\"\nVERSION_ID=\"24.04\"\nVERSION_CODENAME=noble\nID=ubuntu\nID_LIKE=debian\n";
const FEDORA: &str = "PRETTY_NAME=\"Fedora Linux 44\"\nVERSION_ID=44\nID=fedora\n";

struct System {
    dir: TempDir,
}

impl System {
    fn new(os_release: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("apt/sources.list.d")).unwrap();
        fs::write(dir.path().join("os-release"), os_release).unwrap();
        Self { dir }
    }

    fn source(self, name: &str, text: &str) -> Self {
        fs::write(self.dir.path().join("apt").join(name), text).unwrap();
        self
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Runs bash code with the functions of the set-up loaded.
    fn bash(&self, code: &str) -> Output {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        Command::new("bash")
            .arg("-c")
            .arg(format!("source scripts/setup.sh\n{code}"))
            .current_dir(top)
            .env("FORKD_SETUP_LIB", "1")
            .env("FORKD_OS_RELEASE", self.path().join("os-release"))
            .env("FORKD_APT_ROOT", self.path().join("apt"))
            .env("FORKD_SETUP_LOCK", self.path().join("lock"))
            .env("XDG_CACHE_HOME", self.path().join("cache"))
            .output()
            .unwrap()
    }

    fn lines(&self, code: &str) -> Vec<String> {
        let output = self.bash(code);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

fn deb822() -> System {
    System::new(DEBIAN_12)
        .source(
            "sources.list.d/debian.sources",
            "Types: deb deb-src\n# an older mirror\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\
             Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n",
        )
        .source(
            "sources.list.d/other.sources",
            "Types: deb\nURIs: https://broken.example/apt\nSuites: bookworm\nComponents: main\nSigned-By: /usr/share/keyrings/other.gpg\n",
        )
        .source(
            "sources.list.d/off.sources",
            "Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n",
        )
}

#[test]
fn the_three_systems_are_known_and_others_are_not() {
    for (text, expected) in [
        (DEBIAN_12, "debian bookworm 1"),
        (DEBIAN_13, "debian trixie 1"),
        (UBUNTU, "ubuntu noble 1"),
        (FEDORA, "fedora  "),
        ("", "  "),
    ] {
        let lines = System::new(text).lines("read_os; echo \"$os_id $os_codename $os_supported\"");
        assert_eq!(lines, [expected], "{text}");
    }
}

#[test]
fn the_archive_is_found_among_other_publishers() {
    let archive = deb822().lines("apt_archive debian bookworm");
    assert_eq!(
        archive,
        [
            "http://mirror.example/debian|bookworm,bookworm-updates|main|/usr/share/keyrings/debian-archive-keyring.gpg|"
        ]
    );
}

#[test]
fn one_line_entries_are_read_too() {
    let system = System::new(DEBIAN_12).source(
        "sources.list",
        "# deb http://old.example/debian bookworm main\n\
         deb [arch=amd64 signed-by=/usr/share/keyrings/other.gpg] https://other.example/linux bookworm main\n\
         deb-src http://mirror.example/debian bookworm main\n\
         deb [ arch=amd64 ] http://mirror.example/debian/ bookworm main contrib # the archive\n\
         deb http://mirror.example/debian-security bookworm-security main\n",
    );
    let archive = system.lines("apt_archive debian bookworm");
    assert_eq!(
        archive,
        ["http://mirror.example/debian/|bookworm|main,contrib||amd64"]
    );
}

#[test]
fn only_the_distribution_s_own_entries_are_used() {
    let text = deb822()
        .lines("d=$(mktemp -d); apt_own_sources debian bookworm \"$d\"; cat \"$d/forkd.sources\"; rm -r \"$d\"")
        .join("\n");
    assert!(
        text.contains("URIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates"),
        "{text}"
    );
    assert!(text.contains("Suites: bookworm-security"), "{text}");
    assert!(!text.contains("broken.example"), "{text}");
    assert!(!text.contains("off.example"), "{text}");
}

#[test]
fn ubuntu_s_archive_has_two_names() {
    let system = System::new(UBUNTU).source(
        "sources.list.d/ubuntu.sources",
        "Types: deb\nURIs: http://mirror.example/ubuntu/\nSuites: noble noble-updates noble-backports\nComponents: main restricted universe multiverse\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n\n\
         Types: deb\nURIs: http://security.example/ubuntu/\nSuites: noble-security\nComponents: main universe\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n",
    );
    let text = system
        .lines("d=$(mktemp -d); apt_own_sources ubuntu noble \"$d\"; cat \"$d/forkd.sources\"; rm -r \"$d\"")
        .join("\n");
    assert!(
        text.contains("Components: main restricted universe multiverse"),
        "{text}"
    );
    assert!(
        text.contains("URIs: http://security.example/ubuntu/"),
        "{text}"
    );
}

#[test]
fn backports_come_from_the_host_s_mirror_once() {
    let system = deb822();
    system.lines("apt_add_backports debian bookworm; apt_add_backports debian bookworm");
    let written = fs::read_to_string(
        system
            .path()
            .join("apt/sources.list.d/forkd-backports.sources"),
    )
    .unwrap();
    assert_eq!(
        written.trim(),
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm-backports\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg"
    );
}

#[test]
fn backports_somebody_configured_are_left_alone() {
    let system = deb822().source(
        "sources.list",
        "deb http://mirror.example/debian bookworm-backports main\n",
    );
    system.lines("apt_add_backports debian bookworm");
    assert!(
        !system
            .path()
            .join("apt/sources.list.d/forkd-backports.sources")
            .exists()
    );
}

#[test]
fn an_unknown_system_is_told_what_is_missing() {
    let output = System::new(FEDORA).bash("needs+=('cmd:no-such-program some-package'); main");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: missing: no-such-program"), "{said}");
    assert!(said.contains("Fedora Linux 44"), "{said}");
}

#[test]
fn without_root_nothing_is_tried() {
    let output =
        deb822().bash("id() { echo 1000; }\nneeds+=('cmd:no-such-program some-package'); main");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("missing: no-such-program"), "{said}");
    assert!(said.contains("sudo make setup"), "{said}");
}

#[test]
fn only_what_is_missing_is_installed_and_only_from_own_lists() {
    let system = deb822();
    let code = "needs=('cmd:no-such-program some-package' 'cmd:bash bash')
        qemu_ready() { true; }; rust_ready() { true; }; id() { echo 0; }
        apt-get() { echo \"apt-get $*\" | sed \"s#$sources#LISTS#\" >> calls
            case \"$*\" in *install*) needs=() ;; esac; }
        cd \"$(dirname \"$FORKD_SETUP_LOCK\")\"; run() { \"$@\"; }; main";
    let output = system.bash(code);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let calls = fs::read_to_string(system.path().join("calls")).unwrap();
    let calls: Vec<&str> = calls.lines().collect();
    assert_eq!(calls.len(), 2, "{calls:?}");
    assert!(
        calls.iter().all(|call| call.contains("sourceparts=LISTS")),
        "{calls:?}"
    );
    assert!(calls[0].ends_with(" update"), "{calls:?}");
    assert!(
        calls[1].ends_with(" install --no-install-recommends some-package"),
        "{calls:?}"
    );
}

#[test]
fn an_old_compiler_is_not_good_enough() {
    let system = System::new(DEBIAN_12);
    let judge = |version: &str| {
        system.lines(&format!(
            "rustc() {{ echo 'rustc {version} (abc 2026-01-01)'; }}; cargo() {{ :; }}; wanted_rust() {{ echo 1.95.0; }}; rust_ready && echo yes || echo no"
        ))
    };
    assert_eq!(judge("1.95.0"), ["yes"]);
    assert_eq!(judge("1.100.0"), ["yes"]);
    assert_eq!(judge("1.94.1"), ["no"]);
    assert_eq!(judge("1.63.0"), ["no"]);
}

#[test]
fn an_old_qemu_is_not_good_enough() {
    let system = System::new(DEBIAN_12);
    let judge = |version: &str| {
        system.lines(&format!(
            "qemu-system-x86_64() {{ echo 'QEMU emulator version {version} (Debian)'; }}; qemu_ready && echo yes || echo no"
        ))
    };
    assert_eq!(judge("10.0.2"), ["yes"]);
    assert_eq!(judge("7.2.19"), ["no"]);
    assert_eq!(judge("8.2.2"), ["no"]);
}
