//! Classes, selectors, messages, reference counts, autorelease pools, exceptions.
#![allow(non_snake_case, non_upper_case_globals)]
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, RwLock};

pub type Id = *mut c_void;
pub type Sel = *const c_char;
pub type Imp = unsafe extern "C-unwind" fn();

pub struct Method {
    sel: Sel,
    imp: Imp,
    types: CString,
}
pub struct Ivar {
    name: CString,
    offset: isize,
}
#[derive(Default)]
struct Body {
    name: CString,
    meta: bool,
    methods: HashMap<usize, &'static Method>,
    ivars: Vec<&'static Ivar>,
    size: usize,
}
#[repr(C)]
pub struct Class {
    isa: AtomicPtr<Class>,
    parent: AtomicPtr<Class>,
    body: RwLock<Option<Body>>,
}
unsafe impl Sync for Class {}
impl Class {
    pub const fn new() -> Self {
        Self { isa: AtomicPtr::new(null_mut()), parent: AtomicPtr::new(null_mut()), body: RwLock::new(None) }
    }
    fn ptr(&self) -> *mut Class {
        std::ptr::from_ref(self).cast_mut()
    }
    fn find(&self, sel: Sel) -> Option<&'static Method> {
        let mut class = self.ptr();
        while let Some(c) = unsafe { class.as_ref() } {
            let body = c.body.read().unwrap();
            let Some(body) = body.as_ref() else { fatal("a class is used before it is registered") };
            if let Some(m) = body.methods.get(&(sel as usize)) {
                return Some(m);
            }
            class = c.parent.load(SeqCst);
        }
        None
    }
    fn name(&self) -> String {
        self.body.read().unwrap().as_ref().map_or("?".into(), |b| b.name.to_str().unwrap().into())
    }
    fn is_meta(&self) -> bool {
        self.body.read().unwrap().as_ref().is_some_and(|b| b.meta)
    }
    fn size(&self) -> usize {
        self.body.read().unwrap().as_ref().map_or(8, |b| b.size)
    }
}

fn fatal(text: &str) -> ! {
    panic!("objc-sim: {text}")
}

/// Defines the statics, by class name, that objc2's `class!` refers to.
macro_rules! class_statics {
    ($($name:ident)*) => {
        $( #[unsafe(export_name = concat!("_OBJC_CLASS_", stringify!($name)))] static $name: Class = Class::new(); )*
        fn class_static(name: &str) -> Option<&'static Class> { match name { $( stringify!($name) => Some(&$name), )* _ => None } }
    };
}
class_statics! {
    NSObject NSProxy NSString NSMutableString NSSimpleCString NSConstantString NSArray NSMutableArray NSDictionary NSMutableDictionary NSSet NSMutableSet NSCountedSet
    NSNumber NSDecimalNumber NSValue NSURL NSURLComponents NSURLQueryItem NSError NSException NSAssertionHandler NSEnumerator NSFileSecurity
    MLModel MLModelConfiguration MLModelDescription MLModelStructure MLModelStructureProgram MLModelStructureProgramBlock MLModelStructureProgramFunction
    MLModelStructureProgramOperation MLModelStructureProgramNamedValueType MLMultiArray MLMultiArrayConstraint MLPredictionOptions MLState MLFeatureValue
    MLFeatureDescription MLDictionaryFeatureProvider MLComputePlan MLComputePlanCost MLComputePlanDeviceUsage MLCPUComputeDevice MLGPUComputeDevice
    MLNeuralEngineComputeDevice
}

/// Registered classes by name.
static CLASSES: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

exported! {
    /// Makes a class pair without registering it; null if a class of that name is registered.
    fn objc_allocateClassPair(parent: *const Class, name: *const c_char, _extra: usize) -> *mut Class {
        let name = CStr::from_ptr(name);
        if CLASSES.lock().unwrap().contains_key(name.to_str().unwrap()) {
            return null_mut();
        }
        let parent = parent.as_ref();
        let class: &'static Class =
            class_static(name.to_str().unwrap()).unwrap_or_else(|| Box::leak(Box::new(Class::new())));
        let meta: &'static Class = Box::leak(Box::new(Class::new()));
        *class.body.write().unwrap() =
            Some(Body { name: name.into(), size: parent.map_or(8, Class::size), ..Body::default() });
        *meta.body.write().unwrap() = Some(Body { name: name.into(), meta: true, size: 8, ..Body::default() });
        class.isa.store(meta.ptr(), SeqCst);
        class.parent.store(parent.map_or(null_mut(), Class::ptr), SeqCst);
        meta.isa.store(meta.ptr(), SeqCst);
        // A root metaclass inherits from the root class itself.
        meta.parent.store(parent.map_or(class.ptr(), |p| p.isa.load(SeqCst)), SeqCst);
        class.ptr()
    }
    fn objc_registerClassPair(class: *mut Class) {
        let c = &*class;
        CLASSES.lock().unwrap().insert(c.name(), class as usize);
    }
    fn objc_disposeClassPair(_class: *mut Class) {}
    fn objc_getClass(name: *const c_char) -> *const Class {
        let name = CStr::from_ptr(name).to_str().unwrap();
        CLASSES.lock().unwrap().get(name).map_or(null_mut(), |c| *c as *mut Class)
    }
    fn objc_lookUpClass(name: *const c_char) -> *const Class { objc_getClass(name) }
    fn object_getClass(o: Id) -> *const Class { if o.is_null() { null_mut() } else { *o.cast::<*const Class>() } }
    fn class_getSuperclass(c: *const Class) -> *const Class { (*c).parent.load(SeqCst) }
    fn class_isMetaClass(c: *const Class) -> u8 { (*c).is_meta() as u8 }
    fn class_getName(c: *const Class) -> *const c_char { (*c).body.read().unwrap().as_ref().unwrap().name.as_ptr() }
    fn class_getInstanceSize(c: *const Class) -> usize { (*c).size() }
    fn class_respondsToSelector(c: *const Class, sel: Sel) -> u8 { (*c).find(sel).is_some() as u8 }
    fn class_getInstanceMethod(c: *const Class, sel: Sel) -> *const Method { (*c).find(sel).map_or(std::ptr::null(), |m| m) }
    fn class_getClassMethod(c: *const Class, sel: Sel) -> *const Method {
        class_getInstanceMethod((*c).isa.load(SeqCst), sel)
    }
    fn class_conformsToProtocol(_c: *const Class, _p: *const c_void) -> u8 { 0 }
    fn class_addProtocol(_c: *mut Class, _p: *const c_void) -> u8 { 1 }
    fn objc_getProtocol(_name: *const c_char) -> *const c_void { null_mut() }
    fn class_addMethod(c: *mut Class, sel: Sel, imp: Imp, types: *const c_char) -> u8 {
        let mut body = (*c).body.write().unwrap();
        let methods = &mut body.as_mut().unwrap().methods;
        if methods.contains_key(&(sel as usize)) {
            return 0;
        }
        methods.insert(
            sel as usize,
            Box::leak(Box::new(Method { sel, imp, types: CStr::from_ptr(types).into() })),
        );
        1
    }
    fn class_addIvar(c: *mut Class, name: *const c_char, size: usize, align: u8, _types: *const c_char) -> u8 {
        let mut body = (*c).body.write().unwrap();
        let body = body.as_mut().unwrap();
        let offset = body.size.next_multiple_of(1 << align);
        body.ivars.push(Box::leak(Box::new(Ivar {
            name: CStr::from_ptr(name).into(),
            offset: offset as isize,
        })));
        body.size = offset + size;
        1
    }
    fn class_getInstanceVariable(c: *const Class, name: *const c_char) -> *const Ivar {
        let name = CStr::from_ptr(name);
        let mut class = c;
        while let Some(c) = class.as_ref() {
            if let Some(i) = c.body.read().unwrap().as_ref().unwrap().ivars.iter().find(|i| *i.name == *name) {
                return *i;
            }
            class = c.parent.load(SeqCst);
        }
        std::ptr::null()
    }
    fn ivar_getOffset(i: *const Ivar) -> isize { (*i).offset }
    fn method_getName(m: *const Method) -> Sel { (*m).sel }
    fn method_getTypeEncoding(m: *const Method) -> *const c_char { (*m).types.as_ptr() }
    fn method_getImplementation(m: *const Method) -> Imp { (*m).imp }
    fn sel_registerName(name: *const c_char) -> Sel {
        static SELS: Mutex<BTreeMap<CString, usize>> = Mutex::new(BTreeMap::new());
        let name: CString = CStr::from_ptr(name).into();
        let mut sels = SELS.lock().unwrap();
        if let Some(sel) = sels.get(&name) {
            return *sel as Sel;
        }
        let sel = name.clone().into_raw() as usize;
        sels.insert(name, sel);
        sel as Sel
    }
    fn sel_getName(sel: Sel) -> *const c_char { sel }
    fn sel_isEqual(a: Sel, b: Sel) -> u8 { (a == b) as u8 }
}

// ------------------------------------------------------------------------------------------------------------------------- messages

unsafe extern "C-unwind" fn unrecognized(o: Id, sel: Sel) -> Id {
    let class = unsafe { &*object_getClass(o) };
    let mark = if class.is_meta() { '+' } else { '-' };
    crate::foundation::raise(
        "NSInvalidArgumentException",
        &format!(
            "{mark}[{} {}]: unrecognized selector",
            class.name(),
            unsafe { CStr::from_ptr(sel) }.to_str().unwrap()
        ),
    )
}
fn forward() -> Imp {
    unsafe { std::mem::transmute::<unsafe extern "C-unwind" fn(Id, Sel) -> Id, Imp>(unrecognized) }
}
/// Number of the thread that holds all other threads' messages, or 0.
static HOLDER: AtomicUsize = AtomicUsize::new(0);
fn me() -> usize {
    thread_local! { static ME: u8 = const { 0 } }
    ME.with(|m| std::ptr::from_ref(m) as usize)
}
/// Runs `f` while messages of other threads wait. Objects that `f` releases are gone before any other thread uses them,
/// on every run.
pub fn hold<R>(f: impl FnOnce() -> R) -> R {
    struct Free;
    impl Drop for Free {
        fn drop(&mut self) {
            HOLDER.store(0, SeqCst);
        }
    }
    while HOLDER.compare_exchange(0, me(), SeqCst, SeqCst).is_err() {
        std::thread::yield_now();
    }
    let _free = Free;
    f()
}
#[repr(C)]
pub struct Super {
    receiver: Id,
    class: *const Class,
}
exported! {
    fn objc_msg_lookup(o: Id, sel: Sel) -> Imp {
        let since = std::time::Instant::now();
        while ![0, me()].contains(&HOLDER.load(SeqCst)) {
            if since.elapsed().as_secs() > 10 {
                fatal("a handler waits for a thread that waits for the handler")
            }
            std::thread::yield_now();
        }
        let class = &*object_getClass(o);
        check_alive(o, class, sel);
        class.find(sel).map_or_else(forward, |m| m.imp)
    }
    fn objc_msg_lookup_super(s: *const Super, sel: Sel) -> Imp { (*(*s).class).find(sel).map_or_else(forward, |m| m.imp) }
}

// -------------------------------------------------------------------------------------------------------------------------- objects

/// Header before each object's memory.
struct Header {
    count: AtomicUsize,
    dead: AtomicUsize,
}
const HEADER: usize = 16;
/// Number of objects made since the start, and of objects alive, by class.
static CENSUS: Mutex<BTreeMap<String, (usize, usize)>> = Mutex::new(BTreeMap::new());
/// Returns the number of objects made since the start, by class.
pub fn made() -> BTreeMap<String, usize> {
    CENSUS.lock().unwrap().iter().map(|(name, n)| (name.clone(), n.0)).collect()
}
/// Returns the number of objects alive, by class.
pub fn alive() -> BTreeMap<String, usize> {
    let census = CENSUS.lock().unwrap();
    census.iter().filter(|(_, n)| n.1 != 0).map(|(name, n)| (name.clone(), n.1)).collect()
}

unsafe fn header(o: Id) -> &'static Header {
    unsafe { &*o.byte_sub(HEADER).cast() }
}
unsafe fn check_alive(o: Id, class: &Class, sel: Sel) {
    if !class.is_meta() && unsafe { header(o) }.dead.load(SeqCst) != 0 {
        fatal(&format!(
            "-[{} {}] sent to a deallocated object",
            class.name(),
            unsafe { CStr::from_ptr(sel) }.to_str().unwrap()
        ));
    }
}
fn layout(size: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(size + HEADER, 16).unwrap()
}
/// Tells whether memory of dead objects is freed, for a sanitizer to watch; otherwise it is kept to name the class of
/// dead objects.
fn gives_back() -> bool {
    static G: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *G.get_or_init(|| std::env::var_os("OBJC_SIM_FREE").is_some())
}
pub unsafe fn create(class: *const Class) -> Id {
    let size = unsafe { (*class).size() };
    let o: Id = unsafe { std::alloc::alloc_zeroed(layout(size)).cast::<c_void>().byte_add(HEADER) };
    unsafe {
        header(o).count.store(1, SeqCst);
        *o.cast::<*const Class>() = class;
    }
    let mut census = CENSUS.lock().unwrap();
    let count = census.entry(unsafe { (*class).name() }).or_default();
    *count = (count.0 + 1, count.1 + 1);
    o
}
pub unsafe fn dealloc(o: Id) {
    unsafe {
        header(o).dead.store(1, SeqCst);
        CENSUS.lock().unwrap().entry((*object_getClass(o)).name()).or_default().1 -= 1;
    }
    if gives_back() {
        unsafe { std::alloc::dealloc(o.byte_sub(HEADER).cast(), layout((*object_getClass(o)).size())) }
    }
}
unsafe fn is_class(o: Id) -> bool {
    unsafe { (*object_getClass(o)).is_meta() }
}
exported! {
    fn objc_retain(o: Id) -> Id {
        unsafe {
            if o.is_null() || is_class(o) {
                return o;
            }
            check_alive(o, &*object_getClass(o), c"retain".as_ptr());
            header(o).count.fetch_add(1, SeqCst);
        }
        o
    }
    fn objc_release(o: Id) {
        if o.is_null() || is_class(o) {
            return;
        }
        check_alive(o, &*object_getClass(o), c"release".as_ptr());
        if header(o).count.fetch_sub(1, SeqCst) == 1 {
            header(o).count.store(1 << 40, SeqCst); // while in dealloc
            let sel = sel_registerName(c"dealloc".as_ptr());
            let imp: unsafe extern "C-unwind" fn(Id, Sel) = std::mem::transmute(objc_msg_lookup(o, sel));
            imp(o, sel);
        }
    }
}
thread_local! { static POOLS: RefCell<Vec<Vec<Id>>> = const { RefCell::new(Vec::new()) }; }
exported! {
    fn objc_autorelease(o: Id) -> Id {
        if !o.is_null() {
            POOLS.with_borrow_mut(|p| match p.last_mut() {
                Some(pool) => pool.push(o),
                None => fatal(&format!("autorelease of a {} without a pool: it would leak", unsafe {
                    (*object_getClass(o)).name()
                })),
            });
        }
        o
    }
    fn objc_autoreleasePoolPush() -> Id {
        POOLS.with_borrow_mut(|p| {
            p.push(Vec::new());
            p.len() as Id
        })
    }
    fn objc_autoreleasePoolPop(pool: Id) {
        loop {
            let Some(objects) = POOLS.with_borrow_mut(|p| if p.len() >= pool as usize { p.pop() } else { None })
            else {
                return;
            };
            // Objects autoreleased meanwhile go to the outer pool.
            for o in objects {
                objc_release(o)
            }
        }
    }
    fn objc_autoreleaseReturnValue(o: Id) -> Id { objc_autorelease(o) }
    fn objc_retainAutorelease(o: Id) -> Id { objc_autorelease(objc_retain(o)) }
    fn objc_retainAutoreleaseReturnValue(o: Id) -> Id { objc_retainAutorelease(o) }
    fn objc_retainAutoreleasedReturnValue(o: Id) -> Id { objc_retain(o) }
}

// ----------------------------------------------------------------------------------------------------------------------- exceptions

/// Exception in flight; the catcher takes over its reference.
struct Thrown(Id);
unsafe impl Send for Thrown {}
pub unsafe fn throw(owned: Id) -> ! {
    resume_unwind(Box::new(Thrown(owned)))
}
exported! {
    fn objc_exception_throw(o: Id) -> ! { throw(objc_retain(o)) }
    fn objc2_exception_helper_0_1_try_catch(f: extern "C-unwind" fn(Id), context: Id, error: *mut Id) -> u8 {
        match catch_unwind(AssertUnwindSafe(|| f(context))) {
            Ok(()) => 0,
            Err(payload) => match payload.downcast::<Thrown>() {
                Ok(thrown) => {
                    *error = thrown.0;
                    1
                }
                Err(panic) => resume_unwind(panic),
            },
        }
    }
}
