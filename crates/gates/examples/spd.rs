use anemoe_convert::checkpoint::Checkpoint;
use anemoe_gates::reference::*;
fn main(){ 
 let r = anemoe_convert::inspect::checkpoint(Checkpoint::open("synthetic:gemma4-26b-a4b").unwrap()).unwrap(); println!("{} {} {:?}", r.total_parameters, r.active_parameters, r.parts);
 let c=Checkpoint::open("synthetic:gemma4-26b-a4b?layers=6").unwrap();
 let t=std::time::Instant::now(); let g=run(&c,&[2,5,7,100],3,RunOptions{hidden:true,routing:true}).unwrap(); println!("{:.1}s {:?} {:?}", t.elapsed().as_secs_f64(), g.decode_tokens, g.router_index[0]);
 let s: Vec<f32> = g.hidden_states.iter().map(|h| (h[3].iter().map(|v| v*v).sum::<f32>()/2816.).sqrt()).collect(); println!("{s:?} {:?}", &g.logits_full[3][..4]);
 println!("{}", std::fs::read_to_string("/proc/self/status").unwrap().lines().find(|l| l.starts_with("VmHWM")).unwrap());
}
