//! All scenarios, one file per subject.
//!
//! To add a scenario: write an async function in a file of this folder, declare the module, and add the name
//! to [`everyday`] or [`long`]. A guest part also needs an entry in [`guest_half`].

mod boot;
mod boot_time;
mod branch;
mod branch_faults;
mod checkpoint;
mod disk;
mod exec;
mod files;
mod fork;
mod hostile;
mod interp;
mod life;
mod load;
mod net;
mod overhead;
mod prefault;
mod pty;
mod smp;
mod snapshot_safety;
mod unique;

use crate::scenario::{Scenario, list, soaking};

/// The scenarios of this run, in order: the everyday ones, and in a soak run also the long ones.
pub fn all() -> Vec<Scenario> {
    let everyday = everyday().into_iter();
    if !soaking() {
        return everyday.collect();
    }
    let in_parts = |scenario: Scenario| match scenario.name.as_ref() {
        "branch_faults::source_outlives_every_fault" => scenario.parts(branch_faults::PARTS),
        _ => vec![scenario],
    };
    everyday.flat_map(in_parts).chain(long()).collect()
}

/// The scenarios of `make test`, with small counts.
fn everyday() -> Vec<Scenario> {
    list![
        boot: one_vcpu, two_vcpus_and_the_portable_cpu, compressed_kernel_and_no_disk,
            memory_on_both_sides_of_the_hole;
        smp: four_vcpus;
        exec: surroundings_of_a_process, endless_output_is_held_back, many_and_one_after_another;
        files: more_than_fits_into_memory, everything_else;
        pty: screen_programs;
        interp: state_errors_interrupts_and_death;
        net: tcp_through_a_tap, tcp_through_a_socket;
        disk: three_more_disks, full_host;
        life: pause_resume_and_the_power_button, every_end_has_its_code, adopted_by_the_next_controller,
            no_orphans, a_killed_id_is_free;
        hostile: rubbish_in_registers_and_queues, fork_bomb_and_no_memory, rubbish_for_the_agent,
            console_flood;
        overhead: memory_of_the_vmm;
        fork: many_children, two_vcpus, four_vcpus, busy_disk_and_grandchildren;
        prefault: pages_of_the_first_request;
        unique: children_share_nothing;
        snapshot_safety: damaged_snapshots_are_refused, killed_while_it_writes;
        branch: consistent_under_load;
        branch_faults: source_outlives_every_fault;
        checkpoint: a_session_is_what_it_was;
    ]
}

/// Scenarios that take long even with small counts. Only a soak runs them.
fn long() -> Vec<Scenario> {
    list![
        boot_time: against_qemu;
    ]
}

/// Runs the guest part with this name.
pub fn guest_half(name: &str, args: &[String]) -> Option<anyhow::Result<()>> {
    Some(match name {
        "disk-mix" => disk::mix(args),
        "load" => load::run(args),
        _ => return None,
    })
}
