//! The kernel command line of a Linux guest.

/// The command line for a Linux guest on this machine, without what is the image's own business (`root=`,
/// `init=`). The VMM adds nothing to the command line that it is given, so every boot starts from this one.
///
/// - `console=ttyS0 quiet`: the serial port is the only console, and every byte on it costs an exit.
/// - `reboot=a panic=-1`: a reboot goes through the reset register, and a panic ends the machine at once.
/// - `pci=off`: there is no bus to look for.
/// - `tsc=reliable no_timer_check`: the clock needs no watching and no comparison with chips we do not have.
/// - `8250.nr_uarts=1`: one serial port.
/// - `random.trust_cpu=on`: no waiting for entropy at boot.
/// - `cryptomgr.notests`: no self-tests of ciphers on every boot.
/// - `rcupdate.rcu_expedited=1`: grace periods end quickly while few CPUs are up.
pub const LINUX_CMDLINE: &str = "console=ttyS0 quiet reboot=a panic=-1 pci=off tsc=reliable no_timer_check 8250.nr_uarts=1 random.trust_cpu=on cryptomgr.notests rcupdate.rcu_expedited=1";
