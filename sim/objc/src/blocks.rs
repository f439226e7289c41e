//! Objective-C blocks on the heap.
#![allow(non_upper_case_globals)]
use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;
use std::sync::atomic::{AtomicIsize, AtomicU32, Ordering};

#[repr(C)]
struct Block {
    isa: *const c_void,
    flags: AtomicU32,
    reserved: u32,
    invoke: *const c_void,
    descriptor: *const Descriptor,
}
#[repr(C)]
struct Descriptor {
    reserved: usize,
    size: usize,
    copy: Option<unsafe extern "C-unwind" fn(*mut Block, *const Block)>,
    dispose: Option<unsafe extern "C-unwind" fn(*mut Block)>,
}
const NEEDS_FREE: u32 = 1 << 24;
const HAS_HELPERS: u32 = 1 << 25;
const IS_GLOBAL: u32 = 1 << 28;
/// Number of blocks copied to the heap since the start.
pub static COPIED: AtomicIsize = AtomicIsize::new(0);
/// Number of blocks alive on the heap.
pub static BLOCKS: AtomicIsize = AtomicIsize::new(0);
#[unsafe(no_mangle)]
pub static mut _NSConcreteStackBlock: [*mut c_void; 32] = [std::ptr::null_mut(); 32];
#[unsafe(no_mangle)]
pub static mut _NSConcreteMallocBlock: [*mut c_void; 32] = [std::ptr::null_mut(); 32];
exported! {
    fn _Block_copy(block: *const c_void) -> *mut c_void {
        let from = block.cast_mut().cast::<Block>();
        if from.is_null() {
            return from.cast();
        }
        let flags = (*from).flags.load(Ordering::SeqCst);
        if flags & IS_GLOBAL != 0 {
            return from.cast();
        }
        if flags & NEEDS_FREE != 0 {
            (*from).flags.fetch_add(2, Ordering::SeqCst);
            return from.cast();
        }
        let size = (*(*from).descriptor).size;
        let to = alloc(Layout::from_size_align(size, 16).unwrap()).cast::<Block>();
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), size);
        (*to).isa = (&raw const _NSConcreteMallocBlock).cast();
        (*to).flags.store((flags & !0xffff) | NEEDS_FREE | 2, Ordering::SeqCst);
        if flags & HAS_HELPERS != 0 {
            (*(*from).descriptor).copy.unwrap()(to, from);
        }
        BLOCKS.fetch_add(1, Ordering::SeqCst);
        COPIED.fetch_add(1, Ordering::SeqCst);
        to.cast()
    }
    fn _Block_release(block: *const c_void) {
        let block = block.cast_mut().cast::<Block>();
        if block.is_null() {
            return;
        }
        let flags = (*block).flags.load(Ordering::SeqCst);
        if flags & NEEDS_FREE == 0 || flags & IS_GLOBAL != 0 {
            return;
        }
        let left = (*block).flags.fetch_sub(2, Ordering::SeqCst).wrapping_sub(2) & 0xfffe;
        assert!(left < 0xfff0, "a block is released too often");
        if left != 0 {
            return;
        }
        if flags & HAS_HELPERS != 0 {
            (*(*block).descriptor).dispose.unwrap()(block);
        }
        BLOCKS.fetch_sub(1, Ordering::SeqCst);
        dealloc(block.cast(), Layout::from_size_align((*(*block).descriptor).size, 16).unwrap());
    }
}
#[unsafe(no_mangle)]
pub static mut _NSConcreteGlobalBlock: [*mut c_void; 32] = [std::ptr::null_mut(); 32];
