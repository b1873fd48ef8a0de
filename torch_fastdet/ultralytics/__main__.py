from torch_fastdet.ultralytics.launcher import main

main()
