//! Rope, the paged cache and attention, played step by step over sequences.

use std::collections::BTreeMap;

use octavo_kernels::{
    Backend, BlockCopy, CacheDtype, CacheLayer, CacheShape, Heads, KV_SPLIT, Mask, RopeSpec, RopeStyle, Segment,
    StepInput, cpu::Isa, reference::Activations,
};

use crate::harness::*;

/// Sequences of tokens whose projected rows are random, and what attends them.
#[derive(Clone, Debug)]
struct Scene {
    lengths: Vec<usize>,
    heads: Heads,
    dtype: CacheDtype,
    mask: Mask,
    style: RopeStyle,
    rotary_dim: usize,
    norms: bool,
    /// After every step all blocks move on by one place.
    moves: bool,
    /// How much larger some components of all keys are by, and what the backend is told of that.
    common: Option<(f32, bool)>,
    seed: u64,
}

impl Scene {
    fn new(lengths: &[usize], heads: Heads) -> Self {
        let mask = Mask { scale: (heads.head_dim as f32).powf(-0.5), window: None, soft_cap: None };
        let (style, rotary_dim) = (RopeStyle::Halves, heads.head_dim);
        let (lengths, dtype) = (lengths.to_vec(), CacheDtype::F32);
        Self { lengths, heads, dtype, mask, style, rotary_dim, norms: false, moves: false, common: None, seed: 1 }
    }
}

/// Each step: how many more tokens of which sequences, and whether anything looks at the attention's output.
type Plan = Vec<(Vec<(usize, usize)>, bool)>;

/// What a row gave: its rotated queries and keys with its values, then the attention's output.
type Rows = BTreeMap<(usize, usize), Vec<f32>>;

const BLOCK_SIZE: usize = 16;

/// Plays `plan` from an empty cache whose every element is not a number.
fn play<B: Backend>(scene: &Scene, plan: &Plan, backend: &mut B) -> Rows {
    let Scene { ref lengths, heads, .. } = *scene;
    let random = &mut Random::new(scene.seed);
    let total: usize = lengths.iter().sum();
    let first_id: Vec<usize> = lengths.iter().scan(0, |sum, len| Some(std::mem::replace(sum, *sum + len))).collect();

    // The last row of the table poisons.
    let mut projected = random.normals(total * heads.qkv_width());
    let keys = heads.query_width()..heads.query_width() + heads.kv * heads.head_dim;
    let centre: Vec<f32> =
        keys.clone().map(|i| scene.common.map_or(0.0, |c| if i % 7 == 2 { c.0 } else { 0.0 })).collect();
    for row in projected.chunks_exact_mut(heads.qkv_width()) {
        row[keys.clone()].iter_mut().zip(&centre).for_each(|(x, centre)| *x += centre);
    }
    projected.extend(vec![f32::NAN; heads.qkv_width()]);
    let table = dense(backend, &projected, heads.qkv_width());
    let inv_freq =
        (0..scene.rotary_dim / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / scene.rotary_dim as f32)).collect();
    let rope = backend.rope(&RopeSpec { style: scene.style, inv_freq, scale: 1.1 }).unwrap();
    let norms = [0; 2].map(|_| scene.norms.then(|| backend.vector(&random.normals(heads.head_dim)).unwrap()));

    // Two groups' blocks in no order, one more than needed, and every one of them written to before.
    let blocks: usize = 2 * lengths.iter().map(|len| len.div_ceil(BLOCK_SIZE)).sum::<usize>() + 1;
    let mut shuffled: Vec<u32> = (0..blocks as u32).collect();
    random.shuffle(&mut shuffled);
    let mut free = shuffled.iter().copied();
    let mut tables: [Vec<Vec<u32>>; 2] =
        [0, 1].map(|_| lengths.iter().map(|len| free.by_ref().take(len.div_ceil(BLOCK_SIZE)).collect()).collect());
    let mut spare = free.next().expect("one more than needed");
    let shape = CacheShape { dtype: scene.dtype, ..cache_shape(blocks, heads.kv, heads.head_dim) };
    let mut cache = backend.cache(shape).unwrap();
    if scene.common.is_some_and(|common| common.1) {
        backend.centre_keys(&mut cache, CacheLayer { group: 1, layer: 1 }, centre);
    }
    let mut qkv = backend.buffer(LIMITS.rows, heads.qkv_width()).unwrap();
    let mut out = backend.buffer(LIMITS.rows, heads.query_width()).unwrap();
    let slots: Vec<u32> = (0..(blocks * BLOCK_SIZE) as u32).collect();
    for slots in slots.chunks(LIMITS.rows) {
        let positions: Vec<u32> = (0..slots.len() as u32).collect();
        let segment = Segment { first_row: 0, rows: slots.len(), context: slots.len(), first_table_entry: 0 };
        let ids = vec![total as u32; slots.len()];
        backend.begin(&StepInput { ids: &ids, positions: &positions, slots, segments: &[segment], block_tables: &[] });
        backend.embed(&mut qkv, &table, 1.0);
        for layer in 0..shape.layers {
            let place = CacheLayer { group: 0, layer };
            backend.rope_and_cache(&mut qkv, &mut cache, place, heads, None, None, 1e-6, &rope);
        }
    }

    let mut done = vec![0; lengths.len()];
    let mut result = Rows::new();
    for (advances, attend) in plan {
        let (mut ids, mut positions, mut slots) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
        let (mut segments, mut block_tables) = (Vec::new(), [Vec::new(), Vec::new()]);
        for &(sequence, rows) in advances {
            let context = done[sequence] + rows;
            segments.push(Segment { first_row: ids.len(), rows, context, first_table_entry: block_tables[1].len() });
            for position in done[sequence]..context {
                ids.push((first_id[sequence] + position) as u32);
                positions.push(position as u32);
                for (slots, tables) in slots.iter_mut().zip(&tables) {
                    let block = tables[sequence][position / BLOCK_SIZE] * BLOCK_SIZE as u32;
                    slots.push(block + (position % BLOCK_SIZE) as u32);
                }
            }
            // Blocks before every window have been given back.
            let first_seen = scene.mask.window.map_or(0, |window| (done[sequence] + 1).saturating_sub(window));
            for (block_tables, tables) in block_tables.iter_mut().zip(&tables) {
                block_tables.extend((0..context.div_ceil(BLOCK_SIZE)).map(|i| {
                    if (i + 1) * BLOCK_SIZE <= first_seen { StepInput::NO_BLOCK } else { tables[sequence][i] }
                }));
            }
            done[sequence] = context;
        }
        let (slots, segments, block_tables) = (&slots.concat(), &segments, &block_tables.concat());
        backend.begin(&StepInput { ids: &ids, positions: &positions, slots, segments, block_tables });
        backend.embed(&mut qkv, &table, 1.0);
        let [query_norm, key_norm] = [norms[0].as_ref(), norms[1].as_ref()];
        // Layer 0 and the blocks of group 0 keep their poison, so reading the wrong ones shows.
        let place = CacheLayer { group: 1, layer: 1 };
        backend.rope_and_cache(&mut qkv, &mut cache, place, heads, query_norm, key_norm, 1e-6, &rope);
        if !attend {
            move_blocks(scene, backend, &mut cache, &mut tables, &mut spare);
            continue;
        }
        backend.attention(&mut out, &qkv, &cache, place, heads, scene.mask);
        let qkv = backend.read(&qkv, ids.len(), heads.qkv_width()).to_vec();
        let out = backend.read(&out, ids.len(), heads.query_width());
        for (row, &id) in ids.iter().enumerate() {
            let sequence = first_id.partition_point(|&first| first <= id as usize) - 1;
            let mut values = qkv[row * heads.qkv_width()..][..heads.qkv_width()].to_vec();
            values.extend(&out[row * heads.query_width()..][..heads.query_width()]);
            result.insert((sequence, positions[row] as usize), values);
        }
    }
    result
}

/// Copies every block to where the one before it was.
fn move_blocks<B: Backend>(
    scene: &Scene,
    backend: &mut B,
    cache: &mut B::Cache,
    tables: &mut [Vec<Vec<u32>>; 2],
    spare: &mut u32,
) {
    if scene.moves {
        let mut copies = Vec::new();
        for block in tables.iter_mut().flatten().flatten() {
            copies.push(BlockCopy { from: *block, to: *spare });
            std::mem::swap(block, spare);
        }
        backend.copy_blocks(cache, &copies);
    }
}

/// A plan that brings every sequence to all but its last `rows` tokens, then takes those of all sequences in one step.
fn last_rows_together(lengths: &[usize], rows: &[usize]) -> Plan {
    let last: Vec<_> = lengths.iter().zip(rows).map(|(&len, &rows)| rows.min(len)).collect();
    let before = lengths.iter().zip(&last).map(|(len, last)| len - last).enumerate().filter(|before| before.1 > 0);
    let mut plan: Plan = before.map(|before| (vec![before], false)).collect();
    plan.push((last.into_iter().enumerate().collect(), true));
    plan
}

struct Played<'a>(&'a Scene, &'a Plan);

impl Case for Played<'_> {
    fn name(&self) -> String {
        format!("{:?}", self.0)
    }
    fn run<B: Backend>(&self, backend: &mut B) -> Vec<f32> {
        play(self.0, self.1, backend).into_values().flatten().collect()
    }
}

/// A batch of contexts around every edge, some long, some with many new rows.
const CONTEXTS: [usize; 10] = [1, 15, 16, 17, 255, 256, 257, 600, 40, 2100];
const NEW_ROWS: [usize; 10] = [1, 2, 16, 17, 33, 1, 5, 33, 40, 1];

const SHAPES: [(usize, usize, usize); 9] =
    [(9, 3, 64), (1, 1, 24), (4, 2, 32), (4, 1, 96), (7, 1, 128), (18, 2, 256), (2, 2, 80), (40, 1, 16), (6, 3, 40)];

fn heads((query, kv, head_dim): (usize, usize, usize)) -> Heads {
    Heads { query, kv, head_dim }
}

const NEAR: Tolerance = Tolerance { absolute: 1e-5, relative: 1e-5 };

/// How far queries and weights that are rounded to the cache's type may take a result.
fn of_cache(dtype: CacheDtype) -> Tolerance {
    match dtype {
        CacheDtype::F32 => NEAR,
        // Eight bits are multiplied as f16.
        CacheDtype::F16 | CacheDtype::Fp8E4m3 => Tolerance { absolute: 2e-3, relative: 2e-3 },
        CacheDtype::Bf16 => Tolerance { absolute: 1.5e-2, relative: 1.5e-2 },
        // What is rounded to integers is the same, but for numbers in the middle between two.
        CacheDtype::Int8 => Tolerance { absolute: 2e-3, relative: 2e-3 },
    }
}

/// The CPU multiplies in f32, but for bfloat16 and integers.
fn on_cpu(dtype: CacheDtype) -> Tolerance {
    if matches!(dtype, CacheDtype::Bf16 | CacheDtype::Int8) { of_cache(dtype) } else { NEAR }
}

#[test]
fn a_ragged_batch_with_every_shape_of_heads() {
    for shape in SHAPES {
        let scene = Scene::new(&CONTEXTS, heads(shape));
        check_op(&Played(&scene, &last_rows_together(&CONTEXTS, &NEW_ROWS)), NEAR);
    }
}

/// Pairs of positions that begin and end in the middle of what is seen, and windows that do.
#[test]
fn every_shape_of_heads_in_pairs() {
    let (contexts, new_rows) = ([1, 18, 63, 257, 301], [1, 2, 20, 1, 5]);
    for (i, shape) in SHAPES.into_iter().chain([(2, 1, 112), (1, 1, 512)]).enumerate() {
        for dtype in [CacheDtype::Bf16, CacheDtype::Int8] {
            let mut scene = Scene::new(&contexts, heads(shape));
            (scene.dtype, scene.mask.window) = (dtype, [None, Some(37)][i % 2]);
            if dtype == CacheDtype::Bf16 || shape.2 % 16 == 0 {
                check_on_cpu(&Played(&scene, &last_rows_together(&contexts, &new_rows)), on_cpu(dtype));
            }
        }
    }
}

/// Seventy-seven splits of long items: more than one region of two or three threads has states for.
#[test]
fn more_long_splits_than_there_is_memory_for_at_once() {
    let lengths = [10 * KV_SPLIT + 1];
    let scene = Scene::new(&lengths, heads((7, 7, 16)));
    check_op(&Played(&scene, &last_rows_together(&lengths, &[1])), NEAR);
}

#[test]
fn windows_soft_caps_and_cache_types() {
    let plan = last_rows_together(&CONTEXTS, &NEW_ROWS);
    for window in [None, Some(1), Some(20), Some(256), Some(300)] {
        for (dtype, soft_cap) in [(CacheDtype::F32, Some(5.0)), (CacheDtype::F16, None), (CacheDtype::Bf16, Some(50.0))]
        {
            let mut scene = Scene::new(&CONTEXTS, heads((6, 2, 32)));
            (scene.dtype, scene.mask.window, scene.mask.soft_cap) = (dtype, window, soft_cap);
            check_op_apart(&Played(&scene, &plan), on_cpu(dtype), of_cache(dtype));
        }
        let mut scene = Scene::new(&CONTEXTS, heads((6, 2, 32)));
        (scene.dtype, scene.mask.window, scene.mask.soft_cap) = (CacheDtype::Int8, window, Some(50.0));
        check_on_cpu(&Played(&scene, &plan), on_cpu(scene.dtype));
        let mut scene = Scene::new(&CONTEXTS, heads((6, 2, 32)));
        (scene.dtype, scene.mask.window) = (CacheDtype::Fp8E4m3, window);
        check_on_cuda(&Played(&scene, &plan), Activations::F32, of_cache(scene.dtype));
    }
}

/// Tensor cores take tiles of sixteen pairs of row and head and 64 components at a time: shapes around those, and shapes
/// that have no such form.
#[test]
fn every_shape_of_heads_on_tensor_cores() {
    let (contexts, new_rows) = ([1, 17, 63, 65, 255, 257, 600], [1, 2, 20, 1, 33, 1, 1]);
    let shapes = SHAPES.into_iter().chain([(3, 3, 12), (17, 1, 64), (2, 1, 200), (1, 1, 8)]);
    for (i, shape) in shapes.enumerate() {
        let mut scene = Scene::new(&contexts, heads(shape));
        for dtype in [[CacheDtype::F16, CacheDtype::Bf16][i % 2], CacheDtype::Fp8E4m3] {
            scene.dtype = dtype;
            scene.mask.window = [None, Some(300), Some(64)][i % 3];
            let played = &Played(&scene, &last_rows_together(&contexts, &new_rows));
            check_on_cuda(played, Activations::F32, of_cache(scene.dtype));
        }
    }
}

#[test]
fn rope_styles_partial_rotation_and_head_norms() {
    let lengths = [70, 3, 31];
    let plan = last_rows_together(&lengths, &[5, 3, 31]);
    for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
        for rotary_dim in [64, 48, 2, 0] {
            for norms in [false, true] {
                let mut scene = Scene::new(&lengths, heads((9, 3, 64)));
                (scene.style, scene.rotary_dim, scene.norms) = (style, rotary_dim, norms);
                check_op(
                    &Played(&scene, &plan),
                    if norms { Tolerance { absolute: 1e-4, relative: 1e-4 } } else { NEAR },
                );
            }
        }
    }
}

#[test]
fn copied_blocks_hold_the_same() {
    let plan = last_rows_together(&CONTEXTS, &NEW_ROWS);
    for dtype in [CacheDtype::F32, CacheDtype::F16, CacheDtype::Bf16] {
        let mut scene = Scene::new(&CONTEXTS, heads((6, 2, 32)));
        scene.dtype = dtype;
        let stay = play(&scene, &plan, &mut reference(Activations::Int8));
        scene.moves = true;
        assert_eq!(play(&scene, &plan, &mut reference(Activations::Int8)), stay, "{dtype:?}");
        check_op_apart(&Played(&scene, &plan), on_cpu(dtype), of_cache(dtype));
    }
    let mut scene = Scene::new(&CONTEXTS, heads((6, 2, 32)));
    (scene.dtype, scene.moves) = (CacheDtype::Int8, true);
    check_on_cpu(&Played(&scene, &plan), on_cpu(scene.dtype));
    (scene.dtype, scene.moves) = (CacheDtype::Fp8E4m3, true);
    check_on_cuda(&Played(&scene, &plan), Activations::F32, of_cache(scene.dtype));
}

/// Of keys that have much in common, integers keep what they do not, if they are told; and then no weight is another.
#[test]
fn integers_keep_what_keys_do_not_have_in_common() {
    let (lengths, shape) = ([300, 40], (6, 2, 64));
    let plan = last_rows_together(&lengths, &[3, 1]);
    let outputs = |dtype, centred| {
        let mut scene = Scene::new(&lengths, heads(shape));
        (scene.dtype, scene.rotary_dim, scene.common) = (dtype, 0, Some((60.0, centred)));
        if centred {
            check_on_cpu(&Played(&scene, &plan), on_cpu(dtype));
        }
        let rows = play(&scene, &plan, &mut cpu(Isa::best(), 2));
        rows.into_values().flat_map(|row| row[row.len() - 6 * 64..].to_vec()).collect::<Vec<_>>()
    };
    let want = outputs(CacheDtype::F32, false);
    let error = |centred| {
        let got = outputs(CacheDtype::Int8, centred);
        got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max)
    };
    let (told, untold) = (error(true), error(false));
    assert!(told < 0.05 && untold > 3.0 * told, "off by {told} if told, {untold} if not");
}

/// A row's keys, queries and output are the same bits whether its sequence came as one prompt, in chunks or token by
/// token, alone or among others, on however many threads.
#[test]
fn the_answer_does_not_depend_on_the_weather() {
    let lengths = [KV_SPLIT + 87, 33, 700];
    let alone = |chunk: &dyn Fn(usize) -> usize| -> Plan {
        let mut plan = Plan::new();
        for (sequence, &len) in lengths.iter().enumerate() {
            let mut done = 0;
            while done < len {
                let rows = chunk(done).min(len - done);
                plan.push((vec![(sequence, rows)], true));
                done += rows;
            }
        }
        plan
    };
    let whole = alone(&|_| usize::MAX);
    let mut plans = vec![alone(&|_| 1), alone(&|done| 17 + done % 100)];
    for seed in 0..3 {
        plans.push(at_random(&lengths, &mut Random::new(seed)));
    }
    let caches = [
        (CacheDtype::F32, None),
        (CacheDtype::Bf16, Some(300)),
        (CacheDtype::F16, Some(10)),
        (CacheDtype::Int8, None),
        (CacheDtype::Int8, Some(21)),
    ];
    for (dtype, window) in caches {
        for shape in [(9, 3, 64), (5, 1, if dtype == CacheDtype::Int8 { 48 } else { 24 })] {
            let mut scene = Scene::new(&lengths, heads(shape));
            (scene.dtype, scene.mask.window, scene.norms) = (dtype, window, true);
            let want = play(&scene, &whole, &mut cpu(Isa::best(), 1));
            for (i, plan) in plans.iter().enumerate() {
                for threads in [1, 2, 3] {
                    let got = play(&scene, plan, &mut cpu(Isa::best(), threads));
                    assert_eq!(got.len(), want.len());
                    for (at, want) in &want {
                        assert_bits(&format!("{scene:?}, plan {i}, {threads} threads, {at:?}"), &got[at], want);
                    }
                }
            }
        }
    }
}

/// The same on the CUDA backend.
#[test]
fn nor_does_it_on_cuda() {
    let lengths = [2 * KV_SPLIT + 87, 33];
    let scenes = [
        (CacheDtype::Bf16, None, (5, 1, 24)),
        (CacheDtype::F16, Some(10), (5, 1, 24)),
        (CacheDtype::Bf16, Some(300), (2, 1, 128)),
        (CacheDtype::F32, None, (2, 1, 16)),
        (CacheDtype::Fp8E4m3, None, (17, 1, 64)),
        (CacheDtype::Fp8E4m3, Some(300), (1, 1, 136)),
    ];
    for (dtype, window, shape) in scenes {
        let mut scene = Scene::new(&lengths, heads(shape));
        (scene.dtype, scene.mask.window, scene.norms) = (dtype, window, true);
        let whole = vec![(vec![(0, lengths[0])], true), (vec![(1, lengths[1])], true)];
        for mut backend in cuda_backends() {
            let want = play(&scene, &whole, &mut backend);
            for seed in 0..2 {
                let got = play(&scene, &at_random(&lengths, &mut Random::new(seed)), &mut backend);
                assert_eq!(got.len(), want.len());
                for (at, want) in &want {
                    assert_bits(&format!("{scene:?}, seed {seed}, {at:?}"), &got[at], want);
                }
            }
        }
    }
}

/// Steps of some of the sequences by some of their tokens each.
fn at_random(lengths: &[usize], random: &mut Random) -> Plan {
    let mut left = lengths.to_vec();
    let mut plan = Plan::new();
    while left.iter().any(|&left| left > 0) {
        let mut step = Vec::new();
        for (sequence, left) in left.iter_mut().enumerate() {
            let rows = [0, 1, 1, 5, 64, 300][random.below(6)].min(*left);
            if rows > 0 {
                step.push((sequence, rows));
                *left -= rows;
            }
        }
        random.shuffle(&mut step);
        if !step.is_empty() {
            plan.push((step, true));
        }
    }
    plan
}

/// The reference does not depend on it either, or it would not be one.
#[test]
fn nor_does_the_reference() {
    let lengths = [40, 21];
    let scene = Scene::new(&lengths, heads((4, 2, 32)));
    let whole = vec![(vec![(0, 40)], true), (vec![(1, 21)], true)];
    let want = play(&scene, &whole, &mut reference(Activations::F32));
    let got = play(&scene, &at_random(&lengths, &mut Random::new(5)), &mut reference(Activations::F32));
    assert!(!want.is_empty() && want.values().flatten().all(|x| x.is_finite()));
    for (at, want) in &want {
        assert_bits(&format!("{at:?}"), &got[at], want);
    }
}
