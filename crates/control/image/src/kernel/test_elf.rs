//! Builds small ELF files for tests.

/// An ELF file with one section, `.modinfo`.
pub fn module_file(modinfo: &str) -> Vec<u8> {
    const HEADER: usize = 64;
    const SECTION: usize = 64;
    let names = b"\0.modinfo\0.shstrtab\0";
    let modinfo_at = HEADER;
    let names_at = modinfo_at + modinfo.len();
    let table_at = (names_at + names.len()).next_multiple_of(8);
    let mut file = vec![0; table_at + 3 * SECTION];
    file[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(16, &1_u16.to_le_bytes()); // relocatable
    put(18, &62_u16.to_le_bytes()); // x86-64
    put(20, &1_u32.to_le_bytes());
    put(40, &(table_at as u64).to_le_bytes());
    put(52, &(HEADER as u16).to_le_bytes());
    put(58, &(SECTION as u16).to_le_bytes());
    put(60, &3_u16.to_le_bytes());
    put(62, &2_u16.to_le_bytes());
    put(modinfo_at, modinfo.as_bytes());
    put(names_at, names);
    let mut section = |index: usize, name: u32, kind: u32, at: usize, size: usize| {
        let base = table_at + index * SECTION;
        put(base, &name.to_le_bytes());
        put(base + 4, &kind.to_le_bytes());
        put(base + 24, &(at as u64).to_le_bytes());
        put(base + 32, &(size as u64).to_le_bytes());
    };
    section(1, 1, 1, modinfo_at, modinfo.len());
    section(2, 10, 3, names_at, names.len());
    file
}
