use super::visible::add_ranges;
use super::*;
use crate::test_data::noise;

#[test]
fn attention_is_that_of_f64_and_a_token_does_not_depend_on_others() {
    for (heads, kv_heads, tokens, d, slots) in [
        (1, 1, 1, 1, 1),
        (4, 2, 3, 64, 40),
        (6, 1, 2, 20, 70),
        (8, 2, 5, 128, 33),
        (3, 3, 4, 17, 100),
        (18, 2, 19, 33, 150),
        (8, 1, 2, 48, 2500),
    ] {
        let s = AttentionShape { heads, kv_heads, tokens, head_dim: d, slots };
        let q = noise(1, heads * tokens * d);
        let kv = noise(2, 2 * kv_heads * slots * d);
        let halves: Vec<u16> = kv.iter().map(|v| half::f16::from_f32(*v).to_bits()).collect();
        let mut mask = vec![-30000f32; tokens * slots];
        for t in 0..tokens {
            for i in 0..slots {
                if i % 7 != 3 && i <= slots / 2 + t || i == slots - 1 {
                    mask[t * slots + i] = 0.0;
                }
            }
        }
        fn view(values: CacheValues<'_>, first: usize, s: AttentionShape) -> CacheView<'_> {
            let (head_stride, slot_stride) = (s.slots * s.head_dim, s.head_dim);
            CacheView { values, first, head_stride, slot_stride }
        }
        let strides = HeadStrides { first: 0, head: tokens * d, token: d };
        let sinks: Vec<f32> = noise(3, heads).into_iter().map(|v| 4.0 * v).collect();
        let run = |pool: &Pool, values: CacheValues<'_>, sinks: Option<&[f32]>| {
            let mut out = vec![0f32; heads * tokens * d];
            let m = Some(Mask { values: &mask, token_stride: slots });
            let (k, v) = (view(values, 0, s), view(values, kv_heads * slots * d, s));
            let softmax = Softmax { scale: 0.3, mask: m, sinks };
            let read = attention(pool, &s, softmax, (&q, strides), &k, &v, (&mut out, strides));
            let seen = if tokens > 1 { slots } else { (0..slots).filter(|&i| mask[i] == 0.0).count() };
            assert_eq!(read, (seen * kv_heads * d * 2 * values.size()) as u64);
            out
        };
        let (one, many) = (Pool::new(1), Pool::new(5));
        let both = [CacheValues::F32(&kv), CacheValues::F16(&halves)];
        for (values, sinks) in both.into_iter().flat_map(|v| [(v, None), (v, Some(sinks.as_slice()))]) {
            let out = run(&one, values, sinks);
            assert_eq!(out, run(&many, values, sinks));
            let at = |i: usize| match values {
                CacheValues::F32(v) => f64::from(v[i]),
                CacheValues::F16(v) => half::f16::from_bits(v[i]).to_f64(),
            };
            for h in 0..heads {
                for t in 0..tokens {
                    let g = h / (heads / kv_heads);
                    let q = &q[(h * tokens + t) * d..][..d];
                    let scores: Vec<f64> = (0..slots)
                        .map(|i| {
                            let dot: f64 =
                                (0..d).map(|c| f64::from(q[c]) * at((g * slots + i) * d + c)).sum();
                            (dot * f64::from(0.3f32) + f64::from(mask[t * slots + i])).exp()
                        })
                        .collect();
                    let sink = sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
                    let sum = scores.iter().sum::<f64>() + sink;
                    for c in 0..d {
                        let exact: f64 = (0..slots)
                            .map(|i| scores[i] / sum * at(((kv_heads + g) * slots + i) * d + c))
                            .sum();
                        let got = f64::from(out[(h * tokens + t) * d + c]);
                        assert!((got - exact).abs() < 1e-5, "{s:?}: {got}, expected {exact}");
                    }
                }
            }
            // Compares the last token alone.
            let t = tokens - 1;
            let alone = AttentionShape { tokens: 1, ..s };
            let mut single = vec![0f32; heads * d];
            let at = HeadStrides { first: t * d, ..strides };
            let mask = Some(Mask { values: &mask[t * slots..], token_stride: slots });
            let softmax = Softmax { scale: 0.3, mask, sinks };
            let (k, v) = (view(values, 0, s), view(values, kv_heads * slots * d, s));
            let to = HeadStrides { first: 0, head: d, token: heads * d };
            attention(&one, &alone, softmax, (&q, at), &k, &v, (&mut single, to));
            for h in 0..heads {
                assert_eq!(single[h * d..(h + 1) * d], out[(h * tokens + t) * d..][..d]);
            }
        }
    }
}

#[test]
fn results_that_overlap_or_lie_outside_are_refused() {
    for (heads, tokens, good) in [
        ((3, 4), (5, 12), true),
        ((3, 20), (5, 4), true),
        ((1, 0), (5, 4), true),
        ((3, 4), (1, 0), true),
        ((1, 0), (1, 0), true),
        ((2, 4), (2, 4), false),
        ((3, 4), (5, 11), false),
        ((3, 19), (5, 4), false),
        ((3, 3), (5, 100), false),
        ((3, usize::MAX), (5, usize::MAX), false),
    ] {
        assert_eq!(are_disjoint(heads, tokens, 4), good, "{heads:?} {tokens:?}");
    }
    let s = AttentionShape { heads: 9, kv_heads: 9, tokens: 1, head_dim: 4, slots: 1 };
    let (q, kv, mut out) = ([0f32; 36], [0f32; 36], [0f32; 36]);
    let at = HeadStrides { first: 0, head: 4, token: 36 };
    let far = HeadStrides { head: 1 << 61, ..at };
    let view = CacheView { values: CacheValues::F32(&kv), first: 0, head_stride: 4, slot_stride: 4 };
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let softmax = Softmax { scale: 1.0, mask: None, sinks: None };
        attention(&Pool::new(1), &s, softmax, (&q, at), &view, &view, (&mut out, far))
    }));
    assert!(refused.is_err());
}

#[test]
fn unseen_slots_are_in_no_run() {
    let mut found = Vec::new();
    let mut mask = vec![-30000f32; 70];
    found.clear();
    add_ranges(&mask, &mut found);
    assert_eq!((found.len(), found[0].clone()), (1, 0..70));
    mask[3] = 0.0;
    mask[16..40].fill(0.0);
    mask[69] = -1.0;
    found.clear();
    add_ranges(&mask, &mut found);
    assert_eq!(found, [3..4, 16..40, 69..70]);
    // A NaN in the mask counts as seen, and does not change the largest value.
    mask[19] = f32::NAN;
    found.clear();
    add_ranges(&mask, &mut found);
    assert_eq!(found, [3..4, 16..40, 69..70]);
    mask.truncate(36);
    mask[20..].fill(-30000.0);
    found.clear();
    add_ranges(&mask, &mut found);
    assert_eq!(found, [3..4, 16..20]);
}

#[test]
fn many_tokens_see_what_each_sees_alone() {
    let (tokens, slots) = (75, 1000);
    let s = AttentionShape { heads: 1, kv_heads: 1, tokens, head_dim: 1, slots };
    assert!(tokens * slots >= PARALLEL_ATTENTION);
    let values: Vec<f32> =
        noise(7, tokens * slots).into_iter().map(|v| if v < 0.1 { -30000.0 } else { v }).collect();
    let pool = Pool::new(3);
    let mut seen = VisibleSlots::default();
    // Runs that an earlier call left are gone.
    for values in [vec![0.0; tokens * slots], values] {
        seen.find(&pool, &s, Some(Mask { values: &values, token_stride: slots }));
        for (t, mask) in values.chunks(slots).enumerate() {
            let mut alone = Vec::new();
            add_ranges(mask, &mut alone);
            assert_eq!(seen.ranges(t), alone);
        }
    }
    assert_eq!(seen.first.len(), tokens + 1);
}
