//! A guest program of a few bytes, for measuring the way to the first guest instruction.
//!
//! It needs neither a kernel nor devices: it writes one byte to the ready port and halts.

use forkd_vmm_proto::READY_IO_PORT;

/// Where the program is loaded and starts.
pub const ENTRY: u64 = 0x10_0000;

const HEADER: usize = 64 + 56;

/// Where the pages begin that [`dirtying`] writes.
pub const DIRTY_START: u32 = 16 << 20;

/// A program that says it is ready and halts, as an ELF file.
pub fn image() -> Vec<u8> {
    let [low, high] = READY_IO_PORT.to_le_bytes();
    #[rustfmt::skip]
    let code = [
        0x66, 0xba, low, high, // mov dx, port
        0xb0, 0x01,            // mov al, 1
        0xee,                  // out dx, al
        0xf4,                  // hlt
        0xeb, 0xfd,            // jmp hlt
    ];
    elf(&code)
}

/// A program that adds one to the first word of each of `pages` pages from [`DIRTY_START`] on, says that
/// it is ready, and begins again, as an ELF file.
///
/// At every instant the words before the page it is at are one more than those after it.
pub fn dirtying(pages: u32) -> Vec<u8> {
    let [low, high] = READY_IO_PORT.to_le_bytes();
    let mut code = vec![0x66, 0xba, low, high]; // mov dx, port
    code.push(0xbf); // again: mov edi, first
    code.extend(DIRTY_START.to_le_bytes());
    code.push(0xb9); // mov ecx, pages
    code.extend(pages.to_le_bytes());
    code.extend([0x48, 0xff, 0x07]); // next: inc qword [rdi]
    code.extend([0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00]); // add rdi, 4096
    code.extend([0xff, 0xc9]); // dec ecx
    code.extend([0x75, 0xf2]); // jnz next
    code.extend([0xb0, 0x01, 0xee]); // mov al, 1; out dx, al
    code.extend([0xeb, 0xe3]); // jmp again
    elf(&code)
}

fn elf(code: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEADER + code.len());
    file.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    push16(&mut file, &[2, 62]); // executable, x86-64
    push32(&mut file, 1);
    push64(&mut file, &[ENTRY, 64, 0]); // entry, program headers, no sections
    push32(&mut file, 0);
    push16(&mut file, &[64, 56, 1, 0, 0, 0]);
    push32(&mut file, 1); // load
    push32(&mut file, 5); // read, execute
    let len = code.len() as u64;
    push64(&mut file, &[HEADER as u64, ENTRY, ENTRY, len, len, 4096]);
    file.extend_from_slice(code);
    file
}

fn push16(file: &mut Vec<u8>, numbers: &[u16]) {
    file.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
}

fn push32(file: &mut Vec<u8>, number: u32) {
    file.extend(number.to_le_bytes());
}

fn push64(file: &mut Vec<u8>, numbers: &[u64]) {
    file.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
}
