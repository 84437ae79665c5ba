//! Bar charts as SVG files, for documents.
//!
//! A [`Chart`] has groups of bars; each group has one bar per series.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;

const WIDTH: f64 = 720.0;
const BAR: f64 = 22.0;
const GAP: f64 = 18.0;
const LABELS: f64 = 150.0;
const VALUES: f64 = 110.0;
const TOP: f64 = 56.0;
/// One colour per series. They also differ in brightness.
const COLOURS: [&str; 3] = ["#2563eb", "#94a3b8", "#0f766e"];

/// Groups of bars, one bar per series.
#[derive(Debug)]
pub struct Chart {
    pub title: String,
    pub unit: &'static str,
    /// Names of the bars in a group.
    pub series: Vec<&'static str>,
    /// Name and values of each group.
    pub groups: Vec<(String, Vec<f64>)>,
    /// A line about host and conditions.
    pub footer: String,
}

impl Chart {
    /// Writes the chart to a file.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        std::fs::write(path, self.svg()).with_context(|| format!("cannot write {}", path.display()))
    }

    fn svg(&self) -> String {
        let group = self.series.len() as f64 * BAR + GAP;
        let height = TOP + self.groups.len() as f64 * group + 30.0;
        let longest = self
            .groups
            .iter()
            .flat_map(|(_, values)| values)
            .fold(f64::MIN_POSITIVE, |longest, value| longest.max(*value));
        let scale = (WIDTH - LABELS - VALUES) / longest;
        let mut svg = String::new();
        let _ = writeln!(
            svg,
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" fill="#334155">
<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>
<text x="12" y="24" font-size="16" font-weight="bold">{}</text>"##,
            escape(&self.title)
        );
        self.legend(&mut svg);
        for (number, (name, values)) in self.groups.iter().enumerate() {
            let top = TOP + number as f64 * group;
            let middle = top + self.series.len() as f64 * BAR / 2.0 + 4.0;
            let _ = writeln!(
                svg,
                r#"<text x="{}" y="{middle:.0}" text-anchor="end">{}</text>"#,
                LABELS - 10.0,
                escape(name)
            );
            for (at, value) in values.iter().enumerate() {
                let y = top + at as f64 * BAR;
                let length = (value * scale).max(1.0);
                let _ = writeln!(
                    svg,
                    r#"<rect x="{LABELS}" y="{y:.0}" width="{length:.1}" height="{}" fill="{}"/><text x="{:.0}" y="{:.0}">{value:.1} {}</text>"#,
                    BAR - 4.0,
                    COLOURS[at % COLOURS.len()],
                    LABELS + length + 6.0,
                    y + 14.0,
                    self.unit
                );
            }
        }
        let _ = writeln!(
            svg,
            "<text x=\"12\" y=\"{:.0}\" font-size=\"11\" fill=\"#64748b\">{}</text>\n</svg>",
            height - 10.0,
            escape(&self.footer)
        );
        svg
    }

    fn legend(&self, svg: &mut String) {
        let mut x = LABELS;
        for (at, name) in self.series.iter().enumerate() {
            let _ = writeln!(
                svg,
                r#"<rect x="{x}" y="34" width="12" height="12" fill="{}"/><text x="{}" y="45">{}</text>"#,
                COLOURS[at % COLOURS.len()],
                x + 18.0,
                escape(name)
            );
            x += 40.0 + 7.5 * name.len() as f64;
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_bar_and_markup_is_escaped() {
        let chart = Chart {
            title: "a < b".into(),
            unit: "ms",
            series: vec!["ours", "floor"],
            groups: vec![
                ("1".into(), vec![1.0, 0.5]),
                ("100".into(), vec![40.0, 30.0]),
            ],
            footer: "here & now".into(),
        };
        let svg = chart.svg();
        assert_eq!(svg.matches(" ms</text>").count(), 4);
        assert!(svg.contains("a &lt; b") && svg.contains("here &amp; now"));
        assert!(svg.contains("width=\"460.0\""), "{svg}");
    }
}
