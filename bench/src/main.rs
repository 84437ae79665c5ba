//! `forkd-bench`: measures what forkd promises, and says what each clock covers.

mod floor;
mod stats;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == floor::CHILD) {
        return floor::child(args[2].parse()?);
    }
    let n = args[1].parse()?;
    let image = tempfile::tempfile_in("/dev/shm")?;
    let memory = forkd_types::MiB(512);
    forkd_probe::floor::write_tiny_image(&image, memory.bytes())?;
    let b = floor::burst(&image, memory, n)?;
    println!("{} {:?}", stats::millis(b.wall), stats::Spread::of(&b.each));
    Ok(())
}
