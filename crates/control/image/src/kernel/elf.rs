//! Reads the needed parts of ELF files: kernels, modules and programs.
//!
//! [`inspect_kernel`] returns version, PVH entry and length of a kernel, [`inspect_module`] the dependencies
//! of a module. Input is untrusted and parsed with the `object` crate.

use std::collections::BTreeSet;

use object::elf::{EM_X86_64, FileHeader64, PT_INTERP, PT_LOAD};
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader, SectionHeader};
use object::{Endianness, LittleEndian, Object, ObjectSection};
use thiserror::Error;

/// `XEN_ELFNOTE_PHYS32_ENTRY`: the entry point of a PVH boot.
const PVH_NOTE: u32 = 18;
/// The text in front of the version in every kernel.
const BANNER: &[u8] = b"Linux version ";

/// Why an ELF file is rejected as a kernel or a module.
#[derive(Debug, Error)]
pub enum ElfError {
    #[error("it is not a 64-bit little-endian ELF file")]
    Malformed(#[source] object::read::Error),
    #[error("the ELF file has no loadable segment")]
    NothingToLoad,
    #[error("the ELF file has no Linux version")]
    NoVersion,
}

/// Properties of an uncompressed kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelElf {
    /// The release, as `uname -r` prints it.
    pub version: String,
    /// Entry point of a PVH boot, if the kernel supports it.
    pub pvh_entry: Option<u64>,
    /// Length of the ELF file. A bzImage carries relocations behind it that only its own decompressor uses.
    pub length: usize,
}

/// Parses an uncompressed kernel.
pub fn inspect_kernel(file: &[u8]) -> Result<KernelElf, ElfError> {
    let header = FileHeader64::<LittleEndian>::parse(file).map_err(ElfError::Malformed)?;
    let endian = header.endian().map_err(ElfError::Malformed)?;
    let segments = header
        .program_headers(endian, file)
        .map_err(ElfError::Malformed)?;
    if !segments
        .iter()
        .any(|segment| segment.p_type(endian) == PT_LOAD)
    {
        return Err(ElfError::NothingToLoad);
    }
    let mut pvh_entry = None;
    for segment in segments {
        let Ok(Some(mut notes)) = segment.notes(endian, file) else {
            continue;
        };
        while let Ok(Some(note)) = notes.next() {
            if note.name() == b"Xen" && note.n_type(endian).0 == PVH_NOTE {
                pvh_entry = pvh_entry.or_else(|| little_endian(note.desc()));
            }
        }
    }
    Ok(KernelElf {
        version: version(file).ok_or(ElfError::NoVersion)?,
        pvh_entry,
        length: length(header, file)?,
    })
}

/// The end of the last part that a header of the file refers to.
fn length(header: &FileHeader64<LittleEndian>, file: &[u8]) -> Result<usize, ElfError> {
    let endian = LittleEndian;
    let segments = header
        .program_headers(endian, file)
        .map_err(ElfError::Malformed)?;
    let sections = header
        .section_headers(endian, file)
        .map_err(ElfError::Malformed)?;
    let table = header.e_shoff.get(endian).saturating_add(
        u64::from(header.e_shentsize.get(endian)).saturating_mul(sections.len() as u64),
    );
    let end = segments
        .iter()
        .map(|segment| segment.file_range(endian))
        .chain(
            sections
                .iter()
                .filter_map(|section| section.file_range(endian)),
        )
        .map(|(offset, size)| offset.saturating_add(size))
        .fold(table, u64::max);
    Ok(usize::try_from(end).unwrap_or(usize::MAX).min(file.len()))
}

/// Whether a file is an x86_64 program without an interpreter, which runs without libraries.
pub fn is_static_program(file: &[u8]) -> bool {
    let Ok(header) = FileHeader64::<LittleEndian>::parse(file) else {
        return false;
    };
    let Ok(segments) = header.program_headers(LittleEndian, file) else {
        return false;
    };
    header.e_machine.get(LittleEndian) == EM_X86_64
        && segments
            .iter()
            .any(|segment| segment.p_type(LittleEndian) == PT_LOAD)
        && !segments
            .iter()
            .any(|segment| segment.p_type(LittleEndian) == PT_INTERP)
}

fn little_endian(bytes: &[u8]) -> Option<u64> {
    match bytes.len() {
        4 => Some(u64::from(u32::from_le_bytes(bytes.try_into().ok()?))),
        8 => Some(u64::from_le_bytes(bytes.try_into().ok()?)),
        _ => None,
    }
}

fn version(file: &[u8]) -> Option<String> {
    let mut from = 0;
    while let Some(at) = find(file.get(from..)?, BANNER) {
        let start = from + at + BANNER.len();
        let word: String = file
            .get(start..)?
            .iter()
            .take(128)
            .take_while(|byte| byte.is_ascii_graphic())
            .map(|byte| char::from(*byte))
            .collect();
        // The banner also exists as a format string; the real one starts with a digit.
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return Some(word);
        }
        from = start;
    }
    None
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let mut from = 0;
    loop {
        from += haystack
            .get(from..)?
            .iter()
            .position(|byte| *byte == first)?;
        if haystack.get(from..)?.starts_with(needle) {
            return Some(from);
        }
        from += 1;
    }
}

/// Dependencies in a module's `.modinfo` section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModuleNeeds {
    /// Modules whose symbols this module uses.
    pub depends: BTreeSet<String>,
    /// Modules to load before this one, if they exist.
    pub wants: BTreeSet<String>,
}

/// Parses an uncompressed module.
pub fn inspect_module(file: &[u8]) -> Result<ModuleNeeds, ElfError> {
    let elf = ElfFile64::<Endianness>::parse(file).map_err(ElfError::Malformed)?;
    let Some(section) = elf.section_by_name(".modinfo") else {
        return Ok(ModuleNeeds::default());
    };
    let data = section.data().map_err(ElfError::Malformed)?;
    let mut needs = ModuleNeeds::default();
    for entry in data.split(|byte| *byte == 0) {
        let entry = String::from_utf8_lossy(entry);
        match entry.split_once('=') {
            Some(("depends", names)) => needs.depends.extend(
                names
                    .split(',')
                    .filter(|name| !name.is_empty())
                    .map(str::to_owned),
            ),
            Some(("softdep", text)) => needs.wants.extend(pre_dependencies(text)),
            _ => {}
        }
    }
    Ok(needs)
}

/// The names behind `pre:` in a soft dependency such as `pre: a b post: c`.
fn pre_dependencies(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut before = false;
    for word in text.split_whitespace() {
        match word {
            "pre:" => before = true,
            "post:" => before = false,
            name if before => names.push(name.to_owned()),
            _ => {}
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_string_is_not_the_version() {
        let file = b"..Linux version %s (%s)\0Linux version 6.12.1-x (builder)\0";
        assert_eq!(version(file).as_deref(), Some("6.12.1-x"));
        assert_eq!(version(b"nothing"), None);
    }

    #[test]
    fn only_what_comes_before_is_wanted() {
        assert_eq!(pre_dependencies("pre: a b post: c pre: d"), ["a", "b", "d"]);
        assert!(pre_dependencies("post: c").is_empty());
    }

    #[test]
    fn other_files_are_refused() {
        assert!(matches!(
            inspect_kernel(b"#!/bin/sh"),
            Err(ElfError::Malformed(_))
        ));
        assert!(matches!(inspect_module(b""), Err(ElfError::Malformed(_))));
    }
}
