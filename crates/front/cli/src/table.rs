//! Tables and values as text.

use std::io::IsTerminal;

use rustix::termios::tcgetwinsize;

/// A table without rules. On a terminal, lines are cut to its width.
pub fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut lines: Vec<[String; N]> = vec![header.map(str::to_owned)];
    lines.extend(rows);
    render(&lines, terminal_width())
}

fn terminal_width() -> Option<usize> {
    let out = std::io::stdout();
    out.is_terminal()
        .then(|| tcgetwinsize(&out).ok().map(|size| usize::from(size.ws_col)))
        .flatten()
        .filter(|width| *width > 0)
}

fn render<const N: usize>(lines: &[[String; N]], most: Option<usize>) -> String {
    let mut widths = [0; N];
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let text = lines.iter().map(|line| {
        let mut text = String::new();
        for (width, cell) in widths.iter().zip(line) {
            text.push_str(&format!("{cell:width$}  "));
        }
        let text = text.trim_end();
        match most {
            Some(most) if text.chars().count() > most => {
                let kept: String = text.chars().take(most.saturating_sub(1)).collect();
                format!("{kept}…")
            }
            _ => text.to_owned(),
        }
    });
    text.collect::<Vec<_>>().join("\n")
}

/// Aligned names and values.
pub fn facts(rows: impl IntoIterator<Item = (&'static str, String)>) -> String {
    let rows: Vec<_> = rows.into_iter().collect();
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let lines: Vec<String> = rows
        .iter()
        .map(|(name, value)| format!("{name:width$}  {value}"))
        .collect();
    lines.join("\n")
}

/// The time since `unix`, in one unit.
pub fn age(unix: u64) -> String {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |passed| passed.as_secs());
    let seconds = now.saturating_sub(unix);
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A number of bytes with a binary unit.
pub fn bytes(count: u64) -> String {
    bytesize::ByteSize(count).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_have_no_tail() {
        let cells = |a: &str, b: &str| [a.to_owned(), b.to_owned()];
        let lines = [cells("A", "B"), cells("22", "long")];
        assert_eq!(render(&lines, None), "A   B\n22  long");
        assert_eq!(render(&lines, Some(6)), "A   B\n22  l…");
        assert_eq!(
            facts([("a", "1".into()), ("long", "2".into())]),
            "a     1\nlong  2"
        );
    }
}
