//! Which shells there are and which should be made: bookkeeping without a system call.
//!
//! A pool holds shells of one shape. It has a depth it should reach, shells that stand ready and a count
//! of those being made. Taking never waits here: the caller makes what the pool does not have.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use forkd_types::Engine;
use forkd_vmm_proto::Shape;
use forkd_vmm_proto::spawn::PoolStatus;

/// How long a pool waits after its first failure in a row before it makes shells again.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// The longest it waits.
const MAX_DELAY: Duration = Duration::from_secs(30);

/// All pools, by shape.
#[derive(Debug)]
pub struct Pools<S> {
    pools: BTreeMap<ShapeKey, Pool<S>>,
    /// How many shells may be in the making for the pools at one time.
    parallel: u32,
}

#[derive(Debug)]
struct Pool<S> {
    shape: Shape,
    depth: u32,
    ready: VecDeque<S>,
    making: u32,
    failures: u32,
    not_before: Option<Instant>,
}

/// Shapes in an order that does not depend on hashing, so that refilling is fair and repeatable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ShapeKey(Engine, u32, u8, bool);

impl From<&Shape> for ShapeKey {
    fn from(shape: &Shape) -> Self {
        let baseline = shape.cpu == forkd_vmm_proto::CpuModel::Baseline;
        Self(shape.engine, shape.memory.0, shape.vcpus, baseline)
    }
}

impl<S> Pools<S> {
    /// No pools yet; at most `parallel` shells are made for them at one time.
    pub fn new(parallel: u32) -> Self {
        Self {
            pools: BTreeMap::new(),
            parallel,
        }
    }

    /// Sets how many shells of a shape should stand ready, and gives back those that are too many.
    pub fn set_depth(&mut self, shape: Shape, depth: u32) -> Vec<S> {
        let pool = self.entry(shape);
        pool.depth = depth;
        pool.not_before = None;
        let surplus = pool.ready.len().saturating_sub(depth as usize);
        let surplus = pool.ready.drain(..surplus).collect();
        self.forget_if_empty(&shape);
        surplus
    }

    /// Takes a ready shell: the oldest, whose pages have had the longest time to settle.
    pub fn take(&mut self, shape: &Shape) -> Option<S> {
        self.pools.get_mut(&shape.into())?.ready.pop_front()
    }

    /// The shapes to start making now, one entry for each shell. They count as in the making from here on.
    pub fn start_making(&mut self, now: Instant) -> Vec<Shape> {
        let mut room = self
            .parallel
            .saturating_sub(self.pools.values().map(|p| p.making).sum());
        let mut started = Vec::new();
        for pool in self.pools.values_mut() {
            if pool.not_before.is_some_and(|at| at > now) {
                continue;
            }
            let have = pool.ready.len() as u32 + pool.making;
            // After a failure a single attempt shows whether the cause is gone.
            let most = if pool.failures > 0 {
                1u32.saturating_sub(pool.making)
            } else {
                u32::MAX
            };
            let count = pool.depth.saturating_sub(have).min(room).min(most);
            room -= count;
            pool.making += count;
            started.extend(std::iter::repeat_n(pool.shape, count as usize));
        }
        started
    }

    /// When the next pool may try again after a failure, if one waits for that.
    pub fn next_attempt(&self) -> Option<Instant> {
        self.pools
            .values()
            .filter(|pool| (pool.ready.len() as u32 + pool.making) < pool.depth)
            .filter_map(|pool| pool.not_before)
            .min()
    }

    /// A shell that was in the making stands ready. It is given back when the pool no longer wants it.
    pub fn made(&mut self, shape: &Shape, shell: S) -> Option<S> {
        let Some(pool) = self.pools.get_mut(&shape.into()) else {
            return Some(shell);
        };
        pool.making = pool.making.saturating_sub(1);
        pool.failures = 0;
        pool.not_before = None;
        if pool.ready.len() as u32 >= pool.depth {
            self.forget_if_empty(shape);
            return Some(shell);
        }
        pool.ready.push_back(shell);
        None
    }

    /// A shell that was in the making went to a request that waited for one.
    pub fn diverted(&mut self, shape: &Shape) {
        if let Some(pool) = self.pools.get_mut(&shape.into()) {
            pool.making = pool.making.saturating_sub(1);
            pool.failures = 0;
        }
    }

    /// Offers a shell that was not made for the pool. It is given back when there is no room for it.
    pub fn offer(&mut self, shape: &Shape, shell: S) -> Option<S> {
        match self.pools.get_mut(&shape.into()) {
            Some(pool) if (pool.ready.len() as u32) < pool.depth => {
                pool.ready.push_back(shell);
                None
            }
            _ => Some(shell),
        }
    }

    /// A shell that was in the making will not come.
    pub fn failed(&mut self, shape: &Shape, now: Instant) {
        let Some(pool) = self.pools.get_mut(&shape.into()) else {
            return;
        };
        pool.making = pool.making.saturating_sub(1);
        pool.failures = pool.failures.saturating_add(1);
        let delay = FIRST_DELAY
            .saturating_mul(1 << (pool.failures - 1).min(16))
            .min(MAX_DELAY);
        pool.not_before = Some(now + delay);
        self.forget_if_empty(shape);
    }

    /// Removes the ready shells of a shape that `gone` says yes to, and counts them.
    pub fn remove(&mut self, shape: &Shape, gone: impl Fn(&S) -> bool) -> usize {
        let Some(pool) = self.pools.get_mut(&shape.into()) else {
            return 0;
        };
        let before = pool.ready.len();
        pool.ready.retain(|shell| !gone(shell));
        before - pool.ready.len()
    }

    /// How each pool stands.
    pub fn status(&self) -> Vec<PoolStatus> {
        self.pools
            .values()
            .map(|pool| PoolStatus {
                shape: pool.shape,
                depth: pool.depth,
                ready: pool.ready.len() as u32,
                making: pool.making,
            })
            .collect()
    }

    fn entry(&mut self, shape: Shape) -> &mut Pool<S> {
        self.pools.entry((&shape).into()).or_insert_with(|| Pool {
            shape,
            depth: 0,
            ready: VecDeque::new(),
            making: 0,
            failures: 0,
            not_before: None,
        })
    }

    fn forget_if_empty(&mut self, shape: &Shape) {
        let key = shape.into();
        if self
            .pools
            .get(&key)
            .is_some_and(|p| p.depth == 0 && p.ready.is_empty() && p.making == 0)
        {
            self.pools.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use forkd_types::MiB;
    use forkd_vmm_proto::CpuModel;
    use proptest::prelude::*;

    use super::*;

    fn shape(memory: u32) -> Shape {
        Shape {
            engine: Engine::FORKD,
            memory: MiB(memory),
            vcpus: 1,
            cpu: CpuModel::Host,
        }
    }

    #[test]
    fn a_pool_fills_to_its_depth_and_no_further() {
        let mut pools = Pools::new(2);
        let now = Instant::now();
        assert!(pools.set_depth(shape(128), 3).is_empty());
        assert_eq!(
            pools.start_making(now).len(),
            2,
            "no more than two at one time"
        );
        assert_eq!(pools.made(&shape(128), 1), None);
        assert_eq!(pools.made(&shape(128), 2), None);
        assert_eq!(pools.start_making(now).len(), 1);
        assert_eq!(pools.made(&shape(128), 3), None);
        assert!(pools.start_making(now).is_empty());
        assert_eq!(pools.take(&shape(128)), Some(1));
        assert_eq!(
            pools.start_making(now).len(),
            1,
            "what was taken is made again"
        );
    }

    #[test]
    fn a_smaller_depth_gives_shells_back() {
        let mut pools = Pools::new(8);
        pools.set_depth(shape(128), 2);
        pools.start_making(Instant::now());
        pools.made(&shape(128), 1);
        assert_eq!(pools.set_depth(shape(128), 0), vec![1]);
        assert_eq!(
            pools.made(&shape(128), 2),
            Some(2),
            "the pool does not need it any more"
        );
        assert!(pools.status().is_empty());
    }

    #[test]
    fn failures_slow_down_and_success_speeds_up_again() {
        let mut pools: Pools<u32> = Pools::new(8);
        let now = Instant::now();
        pools.set_depth(shape(128), 4);
        assert_eq!(pools.start_making(now).len(), 4);
        for _ in 0..4 {
            pools.failed(&shape(128), now);
        }
        assert!(pools.start_making(now).is_empty());
        let next = pools.next_attempt().unwrap();
        assert!(next > now);
        assert_eq!(
            pools.start_making(next).len(),
            1,
            "one attempt after failures"
        );
        pools.made(&shape(128), 7);
        assert_eq!(pools.start_making(next).len(), 3);
    }

    #[test]
    fn a_dead_shell_is_taken_out() {
        let mut pools = Pools::new(8);
        pools.set_depth(shape(128), 2);
        pools.start_making(Instant::now());
        pools.made(&shape(128), 1);
        pools.made(&shape(128), 2);
        assert_eq!(pools.remove(&shape(128), |s| *s == 1), 1);
        assert_eq!(pools.take(&shape(128)), Some(2));
    }

    proptest! {
        /// Whatever happens in whatever order, a pool never holds more than its depth, never makes more
        /// than allowed, and no shell is lost or handed out twice.
        #[test]
        fn shells_are_conserved(steps in proptest::collection::vec((0u8..5, 0u32..6), 1..200)) {
            let mut pools = Pools::new(4);
            let mut next = 0u32;
            let mut making: Vec<Shape> = Vec::new();
            let mut out = std::collections::HashSet::new();
            let now = Instant::now() + Duration::from_secs(3600);
            for (step, value) in steps {
                let shape = shape(128 + 128 * (value % 2));
                match step {
                    0 => for s in pools.set_depth(shape, value) { prop_assert!(out.insert(s)); },
                    1 => making.extend(pools.start_making(now)),
                    2 => if let Some(shape) = making.pop() {
                        next += 1;
                        if let Some(back) = pools.made(&shape, next) { prop_assert!(out.insert(back)); }
                    },
                    3 => if let Some(shape) = making.pop() { pools.failed(&shape, now - MAX_DELAY * 2); },
                    _ => if let Some(s) = pools.take(&shape) { prop_assert!(out.insert(s)); },
                }
                let status = pools.status();
                prop_assert!(status.iter().all(|p| p.ready <= p.depth.max(6)));
                prop_assert!(status.iter().map(|p| p.making).sum::<u32>() as usize == making.len());
                prop_assert!(making.len() <= 4);
                let ready: u32 = status.iter().map(|p| p.ready).sum();
                prop_assert_eq!(ready as usize + out.len(), next as usize);
            }
        }
    }
}
