//! Percentiles of durations.
//!
//! A [`Spread`] has p50, p99 and the maximum in milliseconds. A percentile is a measured value, never an
//! interpolation.

use std::time::Duration;

use serde::Serialize;

/// Percentiles of a set of durations, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl Spread {
    /// The percentiles of durations; all zero for an empty set.
    pub fn of(durations: &[Duration]) -> Self {
        let mut sorted: Vec<f64> = durations.iter().copied().map(millis).collect();
        sorted.sort_by(f64::total_cmp);
        Self {
            p50: rank(&sorted, 50),
            p99: rank(&sorted, 99),
            max: rank(&sorted, 100),
        }
    }

    /// A line of a table: label, then the values.
    pub fn line(&self, what: &str) -> String {
        format!(
            "{what:<32} {:>9.2} {:>9.2} {:>9.2}\n",
            self.p50, self.p99, self.max
        )
    }
}

/// The smallest value that at least `percent` of the values do not exceed.
fn rank(sorted: &[f64], percent: usize) -> f64 {
    let nth = (sorted.len() * percent).div_ceil(100);
    sorted.get(nth.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// A duration in milliseconds.
pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_values_that_occurred() {
        let durations: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        let spread = Spread::of(&durations);
        assert_eq!((spread.p50, spread.p99, spread.max), (100.0, 198.0, 200.0));
    }

    #[test]
    fn one_and_none() {
        let one = Spread::of(&[Duration::from_millis(7)]);
        assert_eq!((one.p50, one.p99, one.max), (7.0, 7.0, 7.0));
        assert_eq!(Spread::of(&[]).max, 0.0);
    }
}
