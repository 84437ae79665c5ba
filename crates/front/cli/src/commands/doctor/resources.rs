//! Checks of memory, resource limits and kernel settings.

use rustix::process::{Resource, getrlimit};

use super::{Check, meminfo, number, read};

const GIB_IN_KIB: u64 = 1 << 20;

pub fn checks() -> Vec<Check> {
    vec![
        memory(),
        swap(),
        overcommit(),
        hugepages(),
        transparent(),
        ksm(),
        open_files(),
        processes(),
        maps(),
        processors(),
    ]
}

fn memory() -> Check {
    let (Some(total), Some(available)) = (meminfo("MemTotal"), meminfo("MemAvailable")) else {
        return Check::skip("memory", "cannot be read");
    };
    let detail = format!(
        "{:.1} GiB free of {:.1}",
        available as f64 / GIB_IN_KIB as f64,
        total as f64 / GIB_IN_KIB as f64
    );
    match available {
        kib if kib >= 2 * GIB_IN_KIB => Check::pass("memory", detail),
        kib if kib >= GIB_IN_KIB / 2 => Check::warn(
            "memory",
            detail,
            "a parent of 512 MiB and a few children fit, not many more",
        ),
        _ => Check::fail(
            "memory",
            detail,
            "free some memory: a parent alone needs 512 MiB",
        ),
    }
}

fn swap() -> Check {
    match meminfo("SwapTotal") {
        Some(0) => Check::pass("swap", "none"),
        Some(kib) => Check::warn(
            "swap",
            format!("{} MiB", kib / 1024),
            "guest memory may be swapped out, which makes sandboxes slow and leaves their memory on disk",
        ),
        None => Check::skip("swap", "cannot be read"),
    }
}

fn overcommit() -> Check {
    match number("/proc/sys/vm/overcommit_memory") {
        Some(2) => Check::warn(
            "overcommit",
            "strict (2)",
            "children share memory with their parent; strict accounting counts it once for each: sysctl vm.overcommit_memory=0",
        ),
        Some(mode) => Check::pass("overcommit", format!("mode {mode}")),
        None => Check::skip("overcommit", "cannot be read"),
    }
}

fn hugepages() -> Check {
    match meminfo("HugePages_Total") {
        Some(0) => Check::pass("hugepages", "none reserved; forkd does not need any"),
        Some(count) => Check::warn(
            "hugepages",
            format!("{count} reserved"),
            "memory that sandboxes cannot use: sysctl vm.nr_hugepages=0",
        ),
        None => Check::skip("hugepages", "cannot be read"),
    }
}

fn transparent() -> Check {
    match read("/sys/kernel/mm/transparent_hugepage/enabled") {
        Some(text) if text.contains("[always]") => Check::warn(
            "THP",
            text,
            "a child's first write to a page may copy 2 MiB: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Some(text) => Check::pass("THP", text),
        None => Check::skip("THP", "not in this kernel"),
    }
}

fn ksm() -> Check {
    match number("/sys/kernel/mm/ksm/run") {
        Some(1) => Check::warn(
            "KSM",
            "running",
            "merging pages across tenants lets one guess what another holds: echo 0 > /sys/kernel/mm/ksm/run",
        ),
        Some(_) => Check::pass("KSM", "off"),
        None => Check::skip("KSM", "not in this kernel"),
    }
}

fn open_files() -> Check {
    let limit = getrlimit(Resource::Nofile).maximum;
    match limit {
        Some(count) if count < 4096 => Check::warn(
            "open files",
            format!("at most {count}"),
            "a hundred sandboxes need about a thousand: raise the hard limit (ulimit -Hn)",
        ),
        Some(count) => Check::pass("open files", format!("at most {count}")),
        None => Check::pass("open files", "no limit"),
    }
}

fn processes() -> Check {
    match getrlimit(Resource::Nproc).current {
        Some(count) if count < 2048 => Check::warn(
            "processes",
            format!("at most {count}"),
            "each sandbox is a process with a few threads: raise it (ulimit -u)",
        ),
        Some(count) => Check::pass("processes", format!("at most {count}")),
        None => Check::pass("processes", "no limit"),
    }
}

fn maps() -> Check {
    match number("/proc/sys/vm/max_map_count") {
        Some(count) if count < 65530 => Check::warn(
            "max_map_count",
            count.to_string(),
            "deep chains of snapshots need many mappings: sysctl vm.max_map_count=262144",
        ),
        Some(count) => Check::pass("max_map_count", count.to_string()),
        None => Check::skip("max_map_count", "cannot be read"),
    }
}

fn processors() -> Check {
    match std::thread::available_parallelism() {
        Ok(count) if count.get() >= 2 => Check::pass("processors", count.to_string()),
        Ok(count) => Check::warn(
            "processors",
            count.to_string(),
            "a burst of children starts one after another",
        ),
        Err(error) => Check::skip("processors", error.to_string()),
    }
}
