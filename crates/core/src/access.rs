//! Access streams: the sequence of offsets that a touch visits in a region.
//!
//! Invariant: a stream depends only on the touch, the region's size and the seed. The same seed gives
//! the same accesses on every machine (real, simulated or null) and in every build.
//! Sources: SplitMix64 (Steele, Lea, Flood 2014). Rejection-inversion for Zipf (Hörmann, Derflinger
//! 1996). A balanced Feistel network with cycle walking (Black, Rogaway 2002) permutes the pointer
//! chase.

/// Applies SplitMix64's finaliser, a bijection that scatters its input over 64 bits.
#[inline(always)]
pub const fn mix64(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the word that a write stores at `offset` of a region, and that a verify expects. It depends
/// on the address, as in the NMS report, so that a page in the wrong place is detected.
#[inline(always)]
pub const fn pattern_word(seed: u64, offset: u64) -> u64 {
    mix64(seed ^ offset.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Derives an independent seed, so that phases, operations and clients do not share streams.
pub const fn derive_seed(seed: u64, phase: u64, op: u64, client: u64) -> u64 {
    mix64(mix64(mix64(seed ^ phase.wrapping_add(1)) ^ op.wrapping_add(1)) ^ client.wrapping_add(1))
}

/// A SplitMix64 generator: one addition and one mix for each number.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator; each seed has its own stream.
    pub const fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// Returns the next 64 random bits.
    #[inline(always)]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    /// Returns a uniform number below `bound`, by multiply-shift. The bias is below `bound / 2^64`.
    #[inline(always)]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }

    /// Returns a uniform number in [0, 1) with 53 bits.
    #[inline(always)]
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// An endless stream of byte offsets into a region. Loops over it are compiled for each pattern.
pub trait Offsets {
    /// Returns the next offset: a multiple of the touch's grain, below the region's size.
    fn next_offset(&mut self) -> u64;
}

/// A stream in which all grains of the region have the same probability.
#[derive(Debug, Clone)]
pub struct Uniform {
    rng: Rng,
    grains: u64,
    grain_bytes: u64,
}

impl Uniform {
    /// Creates a stream over `region_bytes / grain_bytes` grains (at least one).
    pub fn new(seed: u64, region_bytes: u64, grain_bytes: u64) -> Self {
        Uniform { rng: Rng::new(seed), grains: (region_bytes / grain_bytes).max(1), grain_bytes }
    }
}

impl Offsets for Uniform {
    #[inline(always)]
    fn next_offset(&mut self) -> u64 {
        self.rng.below(self.grains) * self.grain_bytes
    }
}

/// A stream of grains by a Zipf law with exponent theta. Popular grains lie scattered over the region.
#[derive(Debug, Clone)]
pub struct Zipf {
    rng: Rng,
    order: Permutation,
    grain_bytes: u64,
    theta: f64,
    h_first: f64,
    h_last: f64,
    accept: f64,
}

impl Zipf {
    /// Creates a stream. `theta` > 0; 0.99 is the usual skew of caches and key-value stores.
    pub fn new(seed: u64, region_bytes: u64, grain_bytes: u64, theta: f64) -> Self {
        let grains = (region_bytes / grain_bytes).max(1);
        let h = |x| zipf_integral(x, theta);
        Zipf {
            rng: Rng::new(seed),
            order: Permutation::new(mix64(seed), grains),
            grain_bytes,
            theta,
            h_first: h(1.5) - 1.0,
            h_last: h(grains as f64 + 0.5),
            accept: 2.0 - zipf_integral_inverse(h(2.5) - (2.0f64).powf(-theta), theta),
        }
    }

    fn rank(&mut self) -> u64 {
        loop {
            let u = self.h_last + self.rng.unit() * (self.h_first - self.h_last);
            let x = zipf_integral_inverse(u, self.theta);
            let k = x.round().clamp(1.0, self.order.len as f64);
            if k - x <= self.accept || u >= zipf_integral(k + 0.5, self.theta) - k.powf(-self.theta)
            {
                return k as u64 - 1;
            }
        }
    }
}

impl Offsets for Zipf {
    fn next_offset(&mut self) -> u64 {
        let rank = self.rank();
        self.order.at(rank) * self.grain_bytes
    }
}

/// Returns the integral of x^-theta, shifted so that it is continuous in theta at 1.
fn zipf_integral(x: f64, theta: f64) -> f64 {
    let log = x.ln();
    if (1.0 - theta).abs() < 1e-9 { log } else { ((1.0 - theta) * log).exp_m1() / (1.0 - theta) }
}

fn zipf_integral_inverse(u: f64, theta: f64) -> f64 {
    let t = (1.0 - theta) * u;
    if (1.0 - theta).abs() < 1e-9 {
        u.exp()
    } else {
        (t.max(-1.0 + 1e-15).ln_1p() / (1.0 - theta)).exp()
    }
}

/// A pointer chase: visits each grain once, in a random cycle.
///
/// The host writes the cycle into memory and follows it; simulators compute it. Both visit `order(0),
/// order(1), …`.
#[derive(Debug, Clone)]
pub struct Chase {
    order: Permutation,
    position: u64,
    grain_bytes: u64,
}

impl Chase {
    /// Creates a cycle over `region_bytes / grain_bytes` grains.
    pub fn new(seed: u64, region_bytes: u64, grain_bytes: u64) -> Self {
        let grains = (region_bytes / grain_bytes).max(1);
        Chase { order: Permutation::new(seed, grains), position: 0, grain_bytes }
    }
}

impl Offsets for Chase {
    fn next_offset(&mut self) -> u64 {
        let grain = self.order.at(self.position);
        self.position = if self.position + 1 == self.order.len { 0 } else { self.position + 1 };
        grain * self.grain_bytes
    }
}

/// A seeded permutation of `0..len` in constant memory.
#[derive(Debug, Clone)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Permutation {
    /// Creates a permutation of `0..len`, `len` ≥ 1.
    pub fn new(seed: u64, len: u64) -> Self {
        let bits = (64 - len.saturating_sub(1).leading_zeros()).max(2);
        let mut rng = Rng::new(seed);
        Permutation { len, half_bits: bits.div_ceil(2), keys: [(); 4].map(|()| rng.next_u64()) }
    }

    /// Returns the image of `index`, which must be below the length.
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.len);
        let mut value = index;
        loop {
            value = self.feistel(value);
            if value < self.len {
                return value;
            }
        }
    }

    fn feistel(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix64(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chase_visits_each_grain_once(seed: u64, grains in 1u64..3000) {
            let mut chase = Chase::new(seed, grains * 64, 64);
            let mut seen = vec![false; grains as usize];
            let first: Vec<_> = (0..grains).map(|_| chase.next_offset()).collect();
            for offset in &first {
                let cell = &mut seen[(offset / 64) as usize];
                prop_assert!(!*cell);
                *cell = true;
            }
            prop_assert_eq!(chase.next_offset(), first[0]);
        }

        #[test]
        fn streams_stay_inside(seed: u64, bytes in 64u64..1_000_000, theta in 0.2f64..1.5) {
            let mut uniform = Uniform::new(seed, bytes, 8);
            let mut zipf = Zipf::new(seed, bytes, 64, theta);
            for _ in 0..100 {
                prop_assert!(uniform.next_offset() + 8 <= bytes);
                prop_assert!(zipf.next_offset() + 64 <= bytes);
            }
        }
    }

    #[test]
    fn zipf_follows_its_law() {
        let (grains, draws) = (1000u64, 400_000);
        let mut zipf = Zipf::new(7, grains * 64, 64, 0.99);
        let mut counts = vec![0u64; grains as usize];
        for _ in 0..draws {
            counts[zipf.rank() as usize] += 1;
        }
        let norm: f64 = (1..=grains).map(|k| (k as f64).powf(-0.99)).sum();
        for k in [1usize, 2, 3, 10, 100] {
            let expected = draws as f64 * (k as f64).powf(-0.99) / norm;
            let found = counts[k - 1] as f64;
            assert!((found - expected).abs() < 5.0 * expected.sqrt(), "{k}: {found} vs {expected}");
        }
    }

    /// Pins the streams: a change here changes every seed's accesses, and with them every golden report.
    #[test]
    fn streams_are_pinned() {
        let mut uniform = Uniform::new(1, 1 << 20, 8);
        let mut chase = Chase::new(1, 1 << 20, 64);
        let first: Vec<_> = (0..3).map(|_| uniform.next_offset()).collect();
        let links: Vec<_> = (0..3).map(|_| chase.next_offset()).collect();
        assert_eq!(first, [594080, 782008, 1018168]);
        assert_eq!(links, [932928, 86656, 647936]);
    }
}
