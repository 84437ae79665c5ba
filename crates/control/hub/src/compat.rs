//! Whether a host can run the memory of an artifact. Asked before any byte of memory is fetched.
//!
//! The VMM compares the whole CPUID table again when it restores a child, and has the last word.

use std::collections::BTreeSet;

use crate::config::{Config, Cpu};
use crate::error::HubError;

/// Features that programs of a guest use directly. Programs choose code by these once, at their start.
const FEATURES: &[&str] = &[
    "cx16",
    "lahf_lm",
    "popcnt",
    "pni",
    "ssse3",
    "sse4_1",
    "sse4_2",
    "avx",
    "avx2",
    "bmi1",
    "bmi2",
    "f16c",
    "fma",
    "abm",
    "movbe",
    "aes",
    "pclmulqdq",
    "sha_ni",
    "rdrand",
    "rdseed",
    "adx",
    "gfni",
    "vaes",
    "vpclmulqdq",
    "fsgsbase",
    "erms",
    "fsrm",
    "clflushopt",
    "clwb",
    "rdtscp",
    "xsave",
    "xsaveopt",
    "xsavec",
    "pku",
    "avx_vnni",
    "avx512f",
    "avx512dq",
    "avx512cd",
    "avx512bw",
    "avx512vl",
    "avx512ifma",
    "avx512vbmi",
    "avx512_vbmi2",
    "avx512_vnni",
    "avx512_bitalg",
    "avx512_vpopcntdq",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
];
/// The features of x86-64-v2 among them.
const BASELINE: &[&str] = &[
    "cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2",
];

/// A host, as far as artifacts are concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Vendor string of the CPU.
    pub vendor: String,
    pub features: BTreeSet<String>,
    /// Engine whose state the daemon can restore.
    pub engine: String,
    /// Format of the state that the engine reads.
    pub state_format: u32,
}

impl Host {
    /// This host, with the engine of the daemon.
    pub fn here(engine: &str, state_format: u32) -> Self {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self::parse(&text, engine, state_format)
    }

    fn parse(cpuinfo: &str, engine: &str, state_format: u32) -> Self {
        let field = |name: &str| {
            let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
            let found = lines.find(|(key, _)| key.trim() == name);
            found.map(|(_, value)| value.trim()).unwrap_or_default()
        };
        let flags: BTreeSet<&str> = field("flags").split_whitespace().collect();
        let features = FEATURES.iter().filter(|feature| flags.contains(**feature));
        Self {
            vendor: field("vendor_id").to_owned(),
            features: features.map(ToString::to_string).collect(),
            engine: engine.to_owned(),
            state_format,
        }
    }

    /// The needs of a machine that runs here.
    pub fn cpu(&self, baseline: bool) -> Cpu {
        let features: Vec<String> = match baseline {
            true => BASELINE.iter().map(ToString::to_string).collect(),
            false => self.features.iter().cloned().collect(),
        };
        Cpu {
            model: if baseline { "baseline" } else { "host" }.to_owned(),
            vendor: self.vendor.clone(),
            features,
        }
    }

    /// Refuses memory that cannot run here, with the reason.
    pub fn check(&self, config: &Config) -> Result<(), HubError> {
        let no = |reason: String| {
            Err(HubError::Incompatible {
                name: config.name.clone(),
                reason,
            })
        };
        if config.engine != self.engine {
            return no(format!(
                "it was made by the engine {}, and here is {}",
                config.engine, self.engine
            ));
        }
        if let Some(format) = config.state_format
            && format != self.state_format
        {
            return no(format!(
                "its state has the format {format}, and the VMM here reads {}",
                self.state_format
            ));
        }
        if config.cpu.vendor != self.vendor {
            return no(format!(
                "it was made on a CPU of {}, and here is {}",
                config.cpu.vendor, self.vendor
            ));
        }
        let lacks: Vec<&str> = config
            .cpu
            .features
            .iter()
            .filter(|feature| !self.features.contains(*feature))
            .map(String::as_str)
            .collect();
        if lacks.is_empty() {
            return Ok(());
        }
        no(format!("the CPU here lacks {}", lacks.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::example;

    const CPUINFO: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu cx16 lahf_lm popcnt pni ssse3 sse4_1 \
        sse4_2 avx avx2 vmx\nprocessor\t: 1\nvendor_id\t: Other\n";

    fn host() -> Host {
        Host::parse(CPUINFO, "forkd", 1)
    }

    #[test]
    fn a_machine_of_this_host_runs_on_this_host() {
        let host = host();
        assert_eq!(host.vendor, "GenuineIntel");
        for baseline in [false, true] {
            let mut config = example();
            config.cpu = host.cpu(baseline);
            host.check(&config).unwrap();
        }
        assert!(!host.features.contains("vmx"));
    }

    #[test]
    fn each_difference_is_named() {
        let reason = |change: &dyn Fn(&mut Config)| {
            let mut config = example();
            config.cpu = host().cpu(false);
            change(&mut config);
            host().check(&config).unwrap_err().to_string()
        };
        assert!(reason(&|c| c.cpu.features.push("avx512f".into())).contains("lacks avx512f"));
        assert!(reason(&|c| c.cpu.vendor = "AuthenticAMD".into()).contains("AuthenticAMD"));
        assert!(reason(&|c| c.engine = "other".into()).contains("other"));
        assert!(reason(&|c| c.state_format = Some(2)).contains("format 2"));
    }
}
