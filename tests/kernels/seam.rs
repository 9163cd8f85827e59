//! What a backend refuses, and that it says so with numbers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use octavo_kernels::{
    Backend, BackendError, CacheDtype, CacheShape, DType, Segment, StepInput, StepLimits, Weight,
    cpu::{CpuBackend, CpuConfig, Isa},
    reference::Activations,
};

use crate::harness::*;

fn message<T>(result: Result<T, BackendError>) -> String {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    }
}

fn check_weights<B: Backend>(b: &mut B) {
    let weight = |dtype, rows, cols, bytes| Weight { dtype, rows, cols, bytes, run_as: dtype };
    let text = message(b.matrix(&[weight(DType::F32, 2, 3, &[0; 23])]));
    assert!(text.contains("23"), "{text}");
    let text = message(b.matrix(&[weight(DType::Q4_0, 1, 33, &[0; 18])]));
    assert!(text.contains("33") && text.contains("32"), "{text}");
    let text = message(b.matrix(&[weight(DType::F32, 1, 2, &[0; 8]), weight(DType::F32, 1, 3, &[0; 12])]));
    assert!(text.contains('2') && text.contains('3'), "{text}");
    message(b.matrix(&[weight(DType::F32, usize::MAX / 2, 8, &[0; 32])]));
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    check_weights(&mut reference(Activations::F32));
    check_weights(&mut cpu(Isa::best(), 2));
    cuda_backends().iter_mut().for_each(check_weights);
}

#[test]
fn memory_that_cannot_be_had_is_an_error() {
    fn check<B: Backend>(b: &mut B) {
        for blocks in [usize::MAX, 1 << 50] {
            let shape = CacheShape { blocks, ..cache_shape(0, 8, 128) };
            assert!(matches!(b.cache(shape).map(|_| ()), Err(BackendError::OutOfMemory { .. })));
        }
        assert!(matches!(b.buffer(1 << 30, 1 << 30).map(|_| ()), Err(BackendError::OutOfMemory { .. })));
    }
    check(&mut reference(Activations::F32));
    check(&mut cpu(Isa::best(), 1));
    cuda_backends().iter_mut().for_each(check);
}

#[test]
fn caches_that_cuda_has_no_kernel_for_are_refused() {
    for mut backend in cuda_backends() {
        let text = message(backend.cache(CacheShape { block_size: 24, ..cache_shape(4, 1, 64) }));
        assert!(text.contains("24") && text.contains("16"), "{text}");
        let text = message(backend.cache(cache_shape(4, 1, 257)));
        assert!(text.contains("257") && text.contains("256"), "{text}");
        let text = message(backend.cache(CacheShape { dtype: CacheDtype::Int8, ..cache_shape(4, 1, 64) }));
        assert!(text.contains("int8") && text.contains("fp8_e4m3"), "{text}");
    }
}

#[test]
fn caches_that_the_cpu_has_no_kernel_for_are_refused() {
    let mut backend = cpu(Isa::best(), 1);
    let text = message(backend.cache(CacheShape { block_size: 24, ..cache_shape(4, 1, 64) }));
    assert!(text.contains("24") && text.contains("16"), "{text}");
    let text = message(backend.cache(cache_shape(4, 1, 8)));
    assert!(text.contains('8') && text.contains("16"), "{text}");
    let text = message(backend.cache(CacheShape { dtype: CacheDtype::Int8, ..cache_shape(4, 1, 40) }));
    assert!(text.contains("int8") && text.contains("40") && text.contains("16"), "{text}");
    let text = message(backend.cache(CacheShape { dtype: CacheDtype::Fp8E4m3, ..cache_shape(4, 1, 64) }));
    assert!(text.contains("fp8_e4m3") && text.contains("int8"), "{text}");
}

#[test]
fn it_says_what_it_is() {
    let text = cpu(Isa::best(), 3).describe();
    assert!(text.contains(&Isa::best().describe()) && text.contains("3 threads"), "{text}");
    assert!(cpu(Isa::best(), 1).describe().ends_with("1 thread"));
}

/// A large pool costs nothing until it is used.
#[cfg(target_os = "linux")]
#[test]
fn an_unused_cache_is_not_resident() {
    let resident_bytes = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let mut backend = cpu(Isa::best(), 1);
    let shape = cache_shape(1 << 12, 8, 128);
    let before = resident_bytes();
    let cache = backend.cache(shape).unwrap();
    // Other tests run in this process meanwhile, so not to the byte.
    assert!(resident_bytes() < before + shape.bytes() / 2, "of {} bytes", shape.bytes());
    drop(cache);
}

#[test]
fn steps_that_contradict_themselves_stop_the_engine() {
    let limits = StepLimits { rows: 4, segments: 2, groups: 2, table_entries: 2 };
    let fine = |first_row, rows, context| Segment { first_row, rows, context, first_table_entry: 0 };
    let check = |what: &str, rows: u32, positions: &[u32], slots: &[u32], segments: &[Segment]| {
        let mut backend =
            CpuBackend::open(CpuConfig { threads: Some(1), isa: None, ..Default::default() }, limits).unwrap();
        let ids: Vec<u32> = (0..rows).collect();
        let input = StepInput { ids: &ids, positions, slots, segments, block_tables: &[] };
        let result = catch_unwind(AssertUnwindSafe(|| backend.begin(&input)));
        assert_eq!(result.is_err(), what != "fine", "{what}");
    };
    check("fine", 3, &[0, 1, 7], &[0, 1, 40], &[fine(0, 2, 2), fine(2, 1, 8)]);
    check("too many rows", 5, &[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4], &[fine(0, 5, 5)]);
    check("fine", 2, &[0, 1], &[0, 1, 20, 21], &[fine(0, 2, 2)]);
    check("too many groups", 2, &[0, 1], &[0, 1, 20, 21, 40, 41], &[fine(0, 2, 2)]);
    check("half a group", 2, &[0, 1], &[0, 1, 20], &[fine(0, 2, 2)]);
    check("a slot of two groups", 2, &[0, 1], &[0, 1, 20, 0], &[fine(0, 2, 2)]);
    check("a slot twice", 3, &[0, 1, 7], &[0, 40, 40], &[fine(0, 2, 2), fine(2, 1, 8)]);
    check("a gap", 3, &[0, 1, 7], &[0, 1, 2], &[fine(0, 1, 1), fine(2, 1, 8)]);
    check("rows left over", 3, &[0, 1, 2], &[0, 1, 2], &[fine(0, 2, 2)]);
    check("positions elsewhere", 2, &[0, 2], &[0, 1], &[fine(0, 2, 2)]);
    check("more rows than context", 2, &[0, 1], &[0, 1], &[fine(0, 2, 1)]);
}
