//! Fuzz targets for the devices.
//!
//! The input controls the driver in the guest and the host side of the device. A device must never spin, and
//! state that it saved must be accepted again.

mod driver;
mod hosts;

use forkd_vmm_proto::DeviceSlot;

use crate::input::Input;
use driver::Driver;
use hosts::{BalloonHost, BlockHost, NetHost, RngHost, VsockHost};

pub(crate) use hosts::{device_of_type, memory_file};

/// The block device.
pub(crate) fn block(data: &[u8]) {
    Driver::new(DeviceSlot::Disk(0), BlockHost::new(), data).run();
}

/// The network device.
pub(crate) fn net(data: &[u8]) {
    Driver::new(DeviceSlot::Net, NetHost::default(), data).run();
}

/// The vsock device, with its rings.
pub(crate) fn vsock(data: &[u8]) {
    Driver::new(DeviceSlot::Vsock, VsockHost::default(), data).run();
}

/// The entropy device.
pub(crate) fn rng(data: &[u8]) {
    Driver::new(DeviceSlot::Rng, RngHost, data).run();
}

/// The balloon device.
pub(crate) fn balloon(data: &[u8]) {
    Driver::new(DeviceSlot::Balloon, BalloonHost, data).run();
}

/// Rings of raw bytes: the input is the descriptor table, the rings and the buffers.
pub(crate) fn virtqueue(data: &[u8]) {
    Driver::new(DeviceSlot::Rng, RngHost, &[]).run_raw(data);
}

/// The vsock device with packets in well-formed chains.
pub(crate) fn vsock_packets(data: &[u8]) {
    let mut input = Input::new(data);
    let mut driver = Driver::new(DeviceSlot::Vsock, VsockHost::default(), &[]);
    driver.post(0, 32, 4096);
    for _ in 0..128 {
        if input.is_empty() {
            break;
        }
        match input.u8() % 8 {
            0 => driver.host_acts(&mut input),
            1 => driver.post(0, 4, 1 + usize::from(input.u16() % 8192)),
            2 => driver.restore(),
            _ => driver.send(1, &hosts::vsock_packet(&mut input)),
        }
    }
    driver.finish();
}
