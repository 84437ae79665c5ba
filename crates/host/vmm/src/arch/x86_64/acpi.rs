//! The ACPI tables: CPUs, devices, interrupts and power registers.
//!
//! The tables describe hardware-reduced ACPI: virtio devices by address and interrupt, a generic event device
//! for the generation ID and the power button, and the sleep and reset registers.

use acpi_tables::aml::{self, Path};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use forkd_memory::GuestMemory;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use super::layout;

const OEM: [u8; 6] = *b"FORKD ";
const TABLE: [u8; 8] = *b"FORKDVM ";
const REVISION: u32 = 1;
/// No VGA, no MSI-X restriction, no CMOS clock; and by leaving it out, no keyboard controller.
const BOOT_ARCH: u16 = 1 << 2 | 1 << 5;

/// The machine that the tables describe.
#[derive(Debug, Clone)]
pub struct AcpiSpec<'a> {
    /// Number of CPUs.
    pub vcpus: u8,
    /// Places in [`layout::SLOTS`] that have a device.
    pub slots: &'a [usize],
}

/// Why the tables cannot be written.
#[derive(Debug, Error)]
pub enum AcpiError {
    /// The tables are larger than the space for them.
    #[error("the ACPI tables do not fit their place")]
    NoRoom,
    /// Guest memory cannot be written.
    #[error("cannot write the ACPI tables")]
    Write(#[source] vm_memory::GuestMemoryError),
}

/// Writes the tables and gives the address of the first.
pub fn write_tables(memory: &GuestMemory, spec: &AcpiSpec<'_>) -> Result<u64, AcpiError> {
    let mut place = Place {
        memory,
        // The root pointer comes first, where kernels look for it.
        next: layout::ACPI_TABLES + 64,
    };
    let dsdt = place.put(&dsdt(spec))?;
    let fadt = place.put(&fadt(dsdt))?;
    let madt = place.put(&madt(spec.vcpus))?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place.put(&xsdt)?;
    place.next = layout::ACPI_TABLES;
    place.put(&Rsdp::new(OEM, xsdt))
}

struct Place<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Place<'_> {
    fn put(&mut self, table: &dyn Aml) -> Result<u64, AcpiError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        let at = self.next;
        let end = at + bytes.len() as u64;
        if end > layout::HIGH_MEMORY {
            return Err(AcpiError::NoRoom);
        }
        self.memory
            .write_slice(&bytes, GuestAddress(at))
            .map_err(AcpiError::Write)?;
        self.next = end.next_multiple_of(16);
        Ok(at)
    }
}

fn port(address: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(address),
    )
}

fn fadt(dsdt: u64) -> impl Aml {
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = BOOT_ARCH.into();
    fadt.sleep_control_reg = port(layout::POWER_PORT);
    fadt.sleep_status_reg = port(layout::POWER_PORT + 1);
    fadt.reset_reg = port(layout::POWER_PORT + 2);
    fadt.reset_value = layout::RESET_VALUE;
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"FORKD\0\0\0").into();
    fadt.finalize()
}

fn madt(vcpus: u8) -> impl Aml {
    let mut madt = MADT::new(
        OEM,
        TABLE,
        REVISION,
        LocalInterruptController::Address(layout::LOCAL_APIC),
    );
    for cpu in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

fn dsdt(spec: &AcpiSpec<'_>) -> Sdt {
    let mut body = Vec::new();
    for cpu in 0..spec.vcpus {
        cpu_device(cpu).to_aml_bytes(&mut body);
    }
    for &slot in spec.slots {
        virtio_device(slot, &mut body);
    }
    serial_device(&mut body);
    panic_device(&mut body);
    event_devices(&mut body);
    let sleep = aml::Package::new(vec![&layout::SLEEP_TYPE_OFF]);
    aml::Name::new("_S5_".into(), &sleep).to_aml_bytes(&mut body);

    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, REVISION);
    dsdt.append_slice(&body);
    dsdt
}

/// A device that only has a name and an id.
fn cpu_device(cpu: u8) -> impl Aml {
    struct Cpu(u8);
    impl Aml for Cpu {
        fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
            let hid = aml::Name::new("_HID".into(), &"ACPI0007");
            let uid = aml::Name::new("_UID".into(), &self.0);
            let name = format!("_SB_.C{:03X}", self.0);
            aml::Device::new(Path::new(&name), vec![&hid, &uid]).to_aml_bytes(sink);
        }
    }
    Cpu(cpu)
}

fn virtio_device(slot: usize, out: &mut Vec<u8>) {
    let name = format!("_SB_.V{slot:03X}");
    // The windows lie below 4 GiB.
    let window = aml::Memory32Fixed::new(true, layout::window(slot) as u32, 0x1000);
    let interrupt = aml::Interrupt::new(true, true, false, false, layout::slot_gsi(slot));
    let hid = aml::Name::new("_HID".into(), &"LNRO0005");
    let uid = aml::Name::new("_UID".into(), &(slot as u8));
    let coherent = aml::Name::new("_CCA".into(), &aml::ONE);
    let resources = aml::ResourceTemplate::new(vec![&window, &interrupt]);
    let crs = aml::Name::new("_CRS".into(), &resources);
    aml::Device::new(Path::new(&name), vec![&hid, &uid, &coherent, &crs]).to_aml_bytes(out);
}

fn serial_device(out: &mut Vec<u8>) {
    use forkd_devices::legacy::{SERIAL_BASE, SERIAL_IRQ, SERIAL_LEN};
    let ports = aml::IO::new(SERIAL_BASE as u16, SERIAL_BASE as u16, 1, SERIAL_LEN as u8);
    let interrupt = aml::Interrupt::new(true, true, false, false, SERIAL_IRQ);
    let hid = aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501"));
    let uid = aml::Name::new("_UID".into(), &aml::ZERO);
    let resources = aml::ResourceTemplate::new(vec![&ports, &interrupt]);
    let crs = aml::Name::new("_CRS".into(), &resources);
    aml::Device::new("_SB_.COM1".into(), vec![&hid, &uid, &crs]).to_aml_bytes(out);
}

/// The device a panicking kernel writes to.
fn panic_device(out: &mut Vec<u8>) {
    let ports = aml::IO::new(layout::PVPANIC_PORT, layout::PVPANIC_PORT, 1, 1);
    let hid = aml::Name::new("_HID".into(), &"QEMU0001");
    let status = aml::Name::new("_STA".into(), &0xfu8);
    let resources = aml::ResourceTemplate::new(vec![&ports]);
    let crs = aml::Name::new("_CRS".into(), &resources);
    aml::Device::new("_SB_.PEVT".into(), vec![&hid, &status, &crs]).to_aml_bytes(out);
}

/// Generation id, power button, and the device whose interrupts announce them.
fn event_devices(out: &mut Vec<u8>) {
    let hid = aml::Name::new("_HID".into(), &"FRKD0001");
    let cid = aml::Name::new("_CID".into(), &"VM_Gen_Counter");
    let ddn = aml::Name::new("_DDN".into(), &"VM_Gen_Counter");
    let (low, high) = (layout::GENERATION as u32, (layout::GENERATION >> 32) as u32);
    let address = aml::Package::new(vec![&low, &high]);
    let addr = aml::Name::new("ADDR".into(), &address);
    aml::Device::new("_SB_.VGEN".into(), vec![&hid, &cid, &ddn, &addr]).to_aml_bytes(out);

    let hid = aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0C0C"));
    let uid = aml::Name::new("_UID".into(), &aml::ZERO);
    aml::Device::new("_SB_.PWRB".into(), vec![&hid, &uid]).to_aml_bytes(out);

    let generation = aml::Interrupt::new(true, true, false, false, layout::GENERATION_GSI);
    let button = aml::Interrupt::new(true, true, false, false, layout::POWER_BUTTON_GSI);
    let resources = aml::ResourceTemplate::new(vec![&generation, &button]);
    let crs = aml::Name::new("_CRS".into(), &resources);
    let hid = aml::Name::new("_HID".into(), &"ACPI0013");
    let uid = aml::Name::new("_UID".into(), &aml::ZERO);
    let changed = 0x80u8;
    let (arg, vgen, button) = (
        aml::Arg(0),
        Path::new("\\_SB_.VGEN"),
        Path::new("\\_SB_.PWRB"),
    );
    let (is_generation_gsi, is_button_gsi) =
        (layout::GENERATION_GSI as u8, layout::POWER_BUTTON_GSI as u8);
    let is_generation = aml::Equal::new(&arg, &is_generation_gsi);
    let is_button = aml::Equal::new(&arg, &is_button_gsi);
    let tell_generation = aml::Notify::new(&vgen, &changed);
    let tell_button = aml::Notify::new(&button, &changed);
    let on_generation = aml::If::new(&is_generation, vec![&tell_generation]);
    let on_button = aml::If::new(&is_button, vec![&tell_button]);
    let event = aml::Method::new("_EVT".into(), 1, true, vec![&on_generation, &on_button]);
    aml::Device::new("_SB_.GED_".into(), vec![&hid, &uid, &crs, &event]).to_aml_bytes(out);
}

#[cfg(test)]
mod tests {
    use forkd_memory::{GuestRam, RamLayout};

    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |acc, b| acc.wrapping_add(*b))
    }

    fn table(memory: &GuestMemory, at: u64) -> Vec<u8> {
        let len: u32 = memory.read_obj(GuestAddress(at + 4)).unwrap();
        let mut bytes = vec![0; len as usize];
        memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    #[test]
    fn tables_hang_together_and_their_sums_are_right() {
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        let memory = ram.memory();
        let spec = AcpiSpec {
            vcpus: 32,
            slots: &[0, 1, 2, 3, 4, 5, 6, 7],
        };
        let rsdp = write_tables(memory, &spec).unwrap();
        let mut root = [0; 36];
        memory.read_slice(&mut root, GuestAddress(rsdp)).unwrap();
        assert_eq!(&root[..8], b"RSD PTR ");
        assert_eq!((sum(&root[..20]), sum(&root)), (0, 0));

        let xsdt_at = u64::from_le_bytes(root[24..32].try_into().unwrap());
        let xsdt = table(memory, xsdt_at);
        assert_eq!(sum(&xsdt), 0);
        let mut names = Vec::new();
        for entry in xsdt[36..].chunks(8) {
            let bytes = table(memory, u64::from_le_bytes(entry.try_into().unwrap()));
            assert_eq!(sum(&bytes), 0);
            if bytes.starts_with(b"FACP") {
                let dsdt = u64::from_le_bytes(bytes[140..148].try_into().unwrap());
                let dsdt = table(memory, dsdt);
                assert!(dsdt.starts_with(b"DSDT"));
                assert_eq!(sum(&dsdt), 0);
                assert_eq!(dsdt.windows(8).filter(|w| w == b"LNRO0005").count(), 8);
                assert_eq!(dsdt.windows(8).filter(|w| w == b"ACPI0007").count(), 32);
            }
            names.push(bytes[..4].to_vec());
        }
        assert_eq!(names, [b"FACP", b"APIC"]);
    }
}
