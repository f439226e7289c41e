//! Weight distributions that the quantizers are tested on.

/// Number of distributions of [`weights`].
pub const KINDS: usize = 8;

/// Makes `n` weights of distribution `kind`, from 0: gaussian, with outliers, heavy tails, few distinct values,
/// denormals of fp16, two far clusters, a grid, constant.
pub fn weights(seed: u64, n: usize, kind: usize) -> Vec<f32> {
    let mut s = seed | 1;
    let mut uniform = move || {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((s >> 33) as f64 / (1u64 << 31) as f64).max(1e-9)
    };
    (0..n)
        .map(|_| {
            let gauss = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
            (match kind {
                0 => 0.02 * gauss,
                1 => 0.02 * gauss * if uniform() < 0.001 { 10.0 } else { 1.0 },
                2 => 0.01 * gauss / uniform().sqrt(),
                3 => (gauss * 3.0).round() * 0.01,
                4 => gauss * 1e-6,
                5 => 0.001 * gauss + if uniform() < 0.5 { 1.0 } else { -1.0 },
                6 => (uniform() * 1000.0).round() * 0.125,
                _ => 0.37,
            }) as f32
        })
        .collect()
}
