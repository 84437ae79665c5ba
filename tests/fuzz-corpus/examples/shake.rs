use std::time::{Duration, Instant};
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let secs: u64 = args[1].parse().unwrap();
    let mut seed: u64 = args.get(2).map_or(88172645463325252, |s| s.parse().unwrap());
    let only = args.get(3).cloned();
    let mut next = move || { seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17; seed };
    for (name, run) in forkd_fuzz_targets::TARGETS {
        if only.as_ref().is_some_and(|o| o != name) { continue; }
        let dir = format!("fuzz/corpus/{name}");
        let seeds: Vec<Vec<u8>> = std::fs::read_dir(&dir).unwrap().map(|e| std::fs::read(e.unwrap().path()).unwrap()).collect();
        let start = Instant::now();
        let mut count = 0u64;
        let mut slowest = Duration::ZERO;
        while start.elapsed() < Duration::from_secs(secs) {
            let mut data = if next() % 8 == 0 {
                (0..next() % 600).map(|_| next() as u8).collect::<Vec<u8>>()
            } else { seeds[(next() % seeds.len() as u64) as usize].clone() };
            for _ in 0..next() % 12 {
                if data.is_empty() { data.push(next() as u8); continue; }
                let at = (next() % data.len() as u64) as usize;
                match next() % 6 {
                    0 => data[at] ^= 1 << (next() % 8),
                    1 => data[at] = next() as u8,
                    2 => { data.insert(at, next() as u8); }
                    3 => { data.remove(at); }
                    4 => { let end = (at + (next() % 40) as usize).min(data.len()); let piece = data[at..end].to_vec(); let to = (next() % (data.len() as u64 + 1)) as usize; data.splice(to..to, piece); }
                    _ => { let v = [0u8, 1, 0xff, 0x7f, 0x80][(next() % 5) as usize]; data[at] = v; }
                }
            }
            let one = Instant::now();
            let result = std::panic::catch_unwind(|| run(&data));
            slowest = slowest.max(one.elapsed());
            count += 1;
            if result.is_err() {
                let path = format!("/work/scratch/shake-{name}-{count}");
                std::fs::write(&path, &data).unwrap();
                println!("CRASH {path}");
                break;
            }
        }
        println!("{name}: {count} runs, slowest {slowest:?}");
    }
}
